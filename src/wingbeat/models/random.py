"""Random models: small targets and drafters for tests, and weights for `--load-format dummy`.

A random target's residual stays near its token's embedding and its logits are sharpened, so the greedy choice is far
from a tie. A random drafter copies that path (attend to the token itself, pass its embedding on, use the target's
head), so it agrees with the target often but not always - as a trained one does.

Legend: H hidden, D draft vocab, V vocab.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from wingbeat.kernels.interface import KernelFactory
from wingbeat.models.config import ModelConfig
from wingbeat.models.decoder import DecoderModel, assemble_weights, tensor_shapes
from wingbeat.models.eagle3 import Eagle3Drafter
from wingbeat.models.eagle3_config import DraftConfig, fit_to_target
from wingbeat.models.eagle3_weights import assemble_draft_weights, aux_norm_sizes, layer_shapes
from wingbeat.models.llama import Shapes
from wingbeat.models.load import CPU, default_kernels, read_config
from wingbeat.models.registry import ARCHITECTURES, find_architecture
from wingbeat.models.rope import RopeConfig

LOGIT_STD = 4.0
LAYER_GAIN = 0.35


def random_target(
    architecture: str = "LlamaForCausalLM",
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    vocab_size: int = 256,
    max_position_embeddings: int = 512,
    rope: RopeConfig | None = None,
    tied: bool = False,
    eos_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    kernels: KernelFactory | None = None,
) -> DecoderModel:
    """A tiny target with seeded random weights; the same arguments give the same model."""
    find_architecture(architecture, "random_target")
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=rope or RopeConfig(),
        tied=tied,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=dtype,
        eos_token_ids=eos_token_ids,
    )
    return target_with_random_weights(config, seed=seed, dtype=dtype, device=device, kernels=kernels)


def dummy_target(
    model: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    kernels: KernelFactory | None = None,
) -> DecoderModel:
    """A target with the sizes in `model`'s config.json and random weights; no tensor file is read."""
    config = read_config(model)
    return target_with_random_weights(config, seed=seed, dtype=dtype or config.dtype, device=device, kernels=kernels)


def target_with_random_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device, kernels: KernelFactory | None
) -> DecoderModel:
    architecture = ARCHITECTURES[config.architecture]
    tensors = random_tensors(tensor_shapes(config, architecture), seed, dtype, device)
    weights = assemble_weights(config, architecture, tensors.__getitem__)
    info = config.info(dtype=dtype, digest=random_digest(config, seed))
    return DecoderModel(info, config, weights, kernels or default_kernels(dtype, device))


def random_drafter(
    target: DecoderModel,
    *,
    draft_vocab_size: int | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    rope: RopeConfig | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    agreeing: bool = True,
    seed: int = 1,
    kernels: KernelFactory | None = None,
) -> Eagle3Drafter:
    """A one-layer drafter for `target`; `agreeing` copies the target's token path, else all weights are random.

    draft_vocab_size None covers the whole vocabulary; smaller ones map to evenly spread target ids.
    """
    info = target.info
    config = DraftConfig(
        origin="random_drafter",
        layer=_draft_layer(target.config, num_heads, num_kv_heads, rope),
        target_hidden_size=info.hidden_size,
        draft_vocab_size=draft_vocab_size or info.vocab_size,
        aux_layer_ids=aux_layer_ids or (0, (info.num_layers + 1) // 2, info.num_layers),
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    return drafter_with_random_weights(config, target, agreeing=agreeing, seed=seed, kernels=kernels)


def drafter_with_random_weights(
    config: DraftConfig, target: DecoderModel, *, agreeing: bool, seed: int, kernels: KernelFactory | None
) -> Eagle3Drafter:
    ids, dtype, device = fit_to_target(config, target.info), target.info.dtype, target.embedding.device
    tensors = random_tensors(random_draft_shapes(config, len(ids)), seed, dtype, device)
    target_ids = spread_ids(config.draft_vocab_size, target.info.vocab_size).to(device)
    if agreeing:
        tensors |= agreeing_tensors(config, tensors)
    weights = assemble_draft_weights(
        config,
        tensors.__getitem__,
        prefix="midlayer.",
        num_aux=len(ids),
        embedding=target.embedding,
        head=target.output_weight[target_ids].contiguous() if agreeing else tensors["lm_head.weight"],
        target_ids=target_ids,
    )
    return Eagle3Drafter(
        config.layer.info(dtype=dtype, digest=random_digest(config, seed)),
        config,
        weights,
        kernels or default_kernels(dtype, device),
        aux_layer_ids=ids,
        num_positions=target.info.max_position_embeddings,
    )


def _draft_layer(
    target: ModelConfig, num_heads: int | None, num_kv_heads: int | None, rope: RopeConfig | None
) -> ModelConfig:
    return replace(
        target,
        architecture="Eagle3",
        num_layers=1,
        num_heads=num_heads or target.num_heads,
        num_kv_heads=num_kv_heads or num_heads or target.num_heads,
        rope=rope or target.rope,
        tied=False,
        qkv_bias=False,
        qk_norm=False,
    )


def random_draft_shapes(config: DraftConfig, num_aux: int) -> Shapes:
    """Every tensor of a raw EAGLE-3 checkpoint but the embedding and the vocabulary maps."""
    hidden = config.layer.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, num_aux * config.target_hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    shapes |= {f"midlayer.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes | {name: (size,) for name, size in aux_norm_sizes(config, num_aux).items()}


def random_digest(config: ModelConfig | DraftConfig, seed: int) -> str:
    """16 hex digits that follow from the sizes and the seed, as the weights do."""
    return hashlib.sha256(f"{config} {seed}".encode()).hexdigest()[:16]


def random_tensors(shapes: Shapes, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Seeded weights: unit embeddings, norms near 1, layers that change the residual by about LAYER_GAIN."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = _scaled(name, noise).to(device=device, dtype=dtype)
    return tensors


def _scaled(name: str, noise: Tensor) -> Tensor:
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    gain = LOGIT_STD if name == "lm_head.weight" else LAYER_GAIN if "o_proj" in name or "down_proj" in name else 1.0
    return noise * gain / math.sqrt(noise.shape[-1])


def agreeing_tensors(config: DraftConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that hand the token's own embedding to the head.

    q = k of the embedding half, so each token attends to itself; v and o add its embedding and take the feature away
    (as far as Hk * D dimensions reach; most of it, so that the feature still matters).
    """
    layer, hidden = config.layer, config.layer.hidden_size
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    group = layer.num_heads // layer.num_kv_heads
    pick = torch.eye(kv_size, hidden)  # [Hk * D, H]
    spread = pick.view(layer.num_kv_heads, 1, layer.head_dim, hidden).expand(-1, group, -1, -1).reshape(q_size, hidden)
    named = {
        "q_proj": 2.0 * torch.cat([spread, torch.zeros_like(spread)], dim=1),
        "k_proj": 2.0 * torch.cat([pick, torch.zeros_like(pick)], dim=1),
        "v_proj": torch.cat([pick, -pick], dim=1),
        "o_proj": spread.T / group,
    }
    fc, down = tensors["fc.weight"], tensors["midlayer.mlp.down_proj.weight"]
    attention = {f"midlayer.self_attn.{name}.weight": value.to(fc).contiguous() for name, value in named.items()}
    return attention | {"fc.weight": 1.2 * fc, "midlayer.mlp.down_proj.weight": 0.4 * down}


def spread_ids(draft_vocab_size: int, vocab_size: int) -> Tensor:
    """[D] int64 rising target ids, evenly spread over the vocabulary."""
    return torch.arange(draft_vocab_size, dtype=torch.int64) * vocab_size // draft_vocab_size
