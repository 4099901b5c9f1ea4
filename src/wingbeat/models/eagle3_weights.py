"""EAGLE-3 checkpoints: names and shapes of both layouts in, DraftWeights out.

Legend: H drafter hidden, D draft vocab, A aux features.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wingbeat.errors import CheckpointError
from wingbeat.models import llama, qwen
from wingbeat.models.checkpoint import Checkpoint
from wingbeat.models.decoder import DecoderModel
from wingbeat.models.draft_vocab import check_mask, target_ids_from_offsets
from wingbeat.models.eagle3 import DraftWeights
from wingbeat.models.eagle3_config import DraftConfig
from wingbeat.models.llama import ReadTensor, Shapes

# The verifier's own tensors, which speculators' training checkpoints carry along; serving has the verifier itself.
IGNORABLE = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def read_draft_weights(
    checkpoint: Checkpoint, config: DraftConfig, target: DecoderModel, *, num_aux: int
) -> DraftWeights:
    """The drafter's tensors, checked against its config and its target."""
    prefix = layer_prefix(checkpoint)
    checkpoint.check(draft_shapes(checkpoint, config, prefix, num_aux), IGNORABLE)

    def read(name: str) -> Tensor:
        return checkpoint.read(name, target.info.dtype, target.embedding.device)

    embedding = read_embedding(checkpoint, config, target, read)
    return assemble_draft_weights(
        config,
        read,
        prefix=prefix,
        num_aux=num_aux,
        embedding=embedding,
        head=read_head(checkpoint, config, target, embedding, read),
        target_ids=read_target_ids(checkpoint, config).to(target.embedding.device),
    )


def layer_prefix(checkpoint: Checkpoint) -> str:
    """ "midlayer." (raw EAGLE-3) or "layers.0." (vLLM, speculators, ModelOpt)."""
    if "fc.weight" not in checkpoint.entries:
        raise CheckpointError(f"{checkpoint.directory}: not an EAGLE-3 drafter: it has no fc.weight")
    return "midlayer." if any(name.startswith("midlayer.") for name in checkpoint.entries) else "layers.0."


def draft_shapes(checkpoint: Checkpoint, config: DraftConfig, prefix: str, num_aux: int) -> Shapes:
    """Every tensor this drafter's checkpoint must hold; embedding, head and d2t only where it may not go without."""
    hidden, draft_vocab, vocab = config.layer.hidden_size, config.draft_vocab_size, config.layer.vocab_size
    shapes: Shapes = {"fc.weight": (hidden, num_aux * config.target_hidden_size), "norm.weight": (hidden,)}
    shapes |= {prefix + name: shape for name, shape in layer_shapes(config).items()}
    shapes |= {name: (size,) for name, size in aux_norm_sizes(config, num_aux).items()}
    optional: Shapes = {"embed_tokens.weight": (vocab, hidden)}
    for_small_vocab: Shapes = {"lm_head.weight": (draft_vocab, hidden), "d2t": (draft_vocab,)}
    if draft_vocab == vocab:
        optional |= for_small_vocab
    else:
        shapes |= for_small_vocab
    if "t2d" in checkpoint.entries:
        optional["t2d"] = (vocab,)
    return shapes | {name: shape for name, shape in optional.items() if name in checkpoint.entries}


def layer_shapes(config: DraftConfig) -> Shapes:
    shapes_of = qwen.qwen3_shapes if config.layer.qk_norm else llama.layer_shapes
    width = 2 * config.layer.hidden_size
    return shapes_of(config.layer, width) | {"hidden_norm.weight": (config.layer.hidden_size,)}


def aux_norm_sizes(config: DraftConfig, num_aux: int) -> dict[str, int]:
    """Names and sizes of the norms ahead of fc, in the order of the aux features."""
    if config.fc_norm:
        return {f"fc_norm.{index}.weight": config.target_hidden_size for index in range(num_aux)}
    return {"input_norm.weight": num_aux * config.target_hidden_size} if config.norm_before_fc else {}


def assemble_draft_weights(
    config: DraftConfig,
    read: ReadTensor,
    *,
    prefix: str,
    num_aux: int,
    embedding: Tensor,
    head: Tensor,
    target_ids: Tensor,
) -> DraftWeights:
    weights_of = qwen.qwen3_weights if config.layer.qk_norm else llama.layer_weights
    return DraftWeights(
        embedding=embedding,
        fc=read("fc.weight"),
        aux_norms=tuple(read(name) for name in aux_norm_sizes(config, num_aux)),
        layer=replace(weights_of(lambda name: read(prefix + name)), input_norm=None),
        input_norm=read(f"{prefix}input_layernorm.weight"),
        hidden_norm=read(f"{prefix}hidden_norm.weight"),
        norm=read("norm.weight"),
        head=head,
        target_ids=target_ids,
    )


def read_embedding(checkpoint: Checkpoint, config: DraftConfig, target: DecoderModel, read: ReadTensor) -> Tensor:
    """The drafter's own embedding, or the target's when the checkpoint has none."""
    if "embed_tokens.weight" in checkpoint.entries:
        return read("embed_tokens.weight")
    if config.layer.hidden_size != target.info.hidden_size:
        raise CheckpointError(
            f"{config.origin}: hidden_size={config.layer.hidden_size} needs an embed_tokens.weight of its own: the "
            f"target's embedding has {target.info.hidden_size} columns"
        )
    return target.embedding


def read_head(
    checkpoint: Checkpoint, config: DraftConfig, target: DecoderModel, embedding: Tensor, read: ReadTensor
) -> Tensor:
    """[D, H]: the checkpoint's head; without one (full vocabulary only) the target's."""
    if "lm_head.weight" in checkpoint.entries:
        return read("lm_head.weight")
    if config.layer.tied:
        return embedding
    if config.layer.hidden_size != target.info.hidden_size:
        raise CheckpointError(f"{config.origin}: hidden_size={config.layer.hidden_size} needs an lm_head.weight")
    return target.output_weight


def read_target_ids(checkpoint: Checkpoint, config: DraftConfig) -> Tensor:
    """[D] int64: identity when the draft vocabulary is the target's and no d2t says otherwise."""
    cpu = torch.device("cpu")
    if "d2t" not in checkpoint.entries:
        return torch.arange(config.draft_vocab_size, dtype=torch.int64)
    ids = target_ids_from_offsets(checkpoint.read("d2t", None, cpu), config.layer.vocab_size)
    if "t2d" in checkpoint.entries:
        check_mask(checkpoint.read("t2d", None, cpu), ids)
    return ids
