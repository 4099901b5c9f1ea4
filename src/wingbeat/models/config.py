"""ModelConfig: the facts of a decoder model, read from Hugging Face's config.json and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from wingbeat.errors import CheckpointError
from wingbeat.kernels.interface import StackShape
from wingbeat.models.fields import Fields, read_json
from wingbeat.models.interface import ModelInfo
from wingbeat.models.rope import RopeConfig, read_rope

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a Llama-shaped decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """Positions the model may use: the window where it has a sliding one (inside it, sliding is full attention)."""
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    """What the checkpoint was saved in."""
    eos_token_ids: tuple[int, ...]

    def stack_shape(self, input_size: int | None = None) -> StackShape:
        return StackShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=self.rms_norm_eps,
            input_size=input_size or self.hidden_size,
        )

    def info(self, *, dtype: torch.dtype, digest: str) -> ModelInfo:
        return ModelInfo(
            architecture=self.architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            dtype=dtype,
            eos_token_ids=self.eos_token_ids,
            digest=digest,
        )


def read_decoder(
    fields: Fields, *, architecture: str, qkv_bias: bool, qk_norm: bool, window: int | None
) -> ModelConfig:
    """The parts every supported architecture writes the same way; `window` caps the usable positions."""
    refuse_variants(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read_kv_heads(fields, heads),
        head_dim=read_head_dim(fields, hidden, heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=min(max_positions, window or max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype=read_dtype(fields),
        eos_token_ids=fields.integers("eos_token_id") or (),
    )


def refuse_variants(fields: Fields) -> None:
    """CheckpointError for switches that would silently change the function we compute."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.refusal("hidden_act", "only silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.refusal(name, "only false")
    if fields.has("quantization_config"):
        raise fields.refusal("quantization_config", "quantised checkpoints are not supported; use an unquantised one")


def read_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"expected a divisor of num_attention_heads={num_heads}")
    return num_kv_heads


def read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.refusal("num_attention_heads", f"expected a divisor of hidden_size={hidden_size}, or a head_dim")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.refusal("head_dim", "expected an even number (RoPE rotates pairs)")
    return head_dim


def read_dtype(fields: Fields) -> torch.dtype:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.text(name, "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.refusal(name, f"expected one of {', '.join(DTYPES)}")
    return DTYPES[value]


def generation_eos(directory: Path) -> tuple[int, ...]:
    """End-of-sequence ids listed in generation_config.json (chat models list more there than in config.json)."""
    path = directory / "generation_config.json"
    return (read_json(path).integers("eos_token_id") or ()) if path.is_file() else ()


def architecture_name(fields: Fields) -> str:
    """The first entry of `architectures`."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{fields.origin}: architectures={names!r} is not valid: expected a list of one name")
    return names[0]
