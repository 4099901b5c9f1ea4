"""DecoderModel: the target. Embed, run the stack, show the aux features asked for, project the wanted rows.

Legend: R query rows, n wanted rows, H hidden, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch, ForwardOutput
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.interface import Head, KernelFactory, LayerWeights
from wingbeat.models.config import ModelConfig
from wingbeat.models.interface import ModelInfo
from wingbeat.models.llama import ReadTensor, Shapes
from wingbeat.models.registry import Architecture
from wingbeat.models.rope import rope_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A target's tensors, checkpoint layout, final dtype and device."""

    embedding: Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    output: Tensor  # [V, H]; the embedding itself when tied


class DecoderModel:
    """A Llama-shaped target (implements interface.TargetModel)."""

    def __init__(self, info: ModelInfo, config: ModelConfig, weights: DecoderWeights, kernels: KernelFactory) -> None:
        self.info, self.config = info, config
        self.embedding = weights.embedding  # [V, H]
        self.norm_weight = weights.norm  # [H]
        self.output_weight = weights.output  # [V, H]; a drafter without a head of its own shares it
        device = weights.embedding.device
        rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings, device)
        self._stack = kernels.stack(config.stack_shape(), weights.layers, rope)
        self._head = kernels.head(weights.norm, config.rms_norm_eps, weights.output)

    def forward(self, batch: ForwardBatch, pool: KVPool, *, capture: tuple[int, ...] = ()) -> ForwardOutput:
        """Logits of batch.logit_rows (all rows when None) and the residual entering each layer in `capture`."""
        residual = torch.nn.functional.embedding(batch.input_ids, self.embedding)  # [R, H]
        residual, aux = self._stack.forward(residual, batch, pool, capture=capture)
        wanted = residual if batch.logit_rows is None else residual[batch.logit_rows]  # [n, H]
        return ForwardOutput(head_or_empty(self._head, wanted, self.info.vocab_size), aux)


def head_or_empty(head: Head, hidden: Tensor, vocab_size: int) -> Tensor:
    """head(hidden), or [0, V] when no row's logits are wanted (a prompt's middle chunk): kernels never see 0 rows."""
    if hidden.shape[0]:
        return head(hidden)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty((0, vocab_size), dtype=dtype)


def assemble_weights(config: ModelConfig, architecture: Architecture, read: ReadTensor) -> DecoderWeights:
    """The weights of a target, each tensor asked for once by its Hugging Face name."""

    def layer(index: int) -> LayerWeights:
        return architecture.layer_weights(lambda name: read(f"model.layers.{index}.{name}"))

    embedding = read("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        norm=read("model.norm.weight"),
        output=embedding if config.tied else read("lm_head.weight"),
    )


def tensor_shapes(config: ModelConfig, architecture: Architecture) -> Shapes:
    """Every tensor a target's checkpoint must hold."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = architecture.layer_shapes(config, None)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
