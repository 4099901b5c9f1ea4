"""Qwen2.5 and Qwen3: Llama's layer plus a bias on q, k, v (Qwen2.5) or a norm on q and k per head (Qwen3)."""

from __future__ import annotations

from dataclasses import replace

from wingbeat.kernels.interface import LayerWeights
from wingbeat.models import llama
from wingbeat.models.config import ModelConfig, read_decoder
from wingbeat.models.fields import Fields
from wingbeat.models.llama import ReadTensor, Shapes, concat


def read_qwen2(fields: Fields) -> ModelConfig:
    refuse_sliding(fields)
    return read_decoder(fields, architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, window=None)


def read_qwen3(fields: Fields) -> ModelConfig:
    refuse_sliding(fields)
    return read_decoder(fields, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, window=None)


def refuse_sliding(fields: Fields) -> None:
    """CheckpointError when some layers attend to a window only (`sliding_window` alone is inactive in Qwen)."""
    if fields.flag("use_sliding_window", False):
        raise fields.refusal("use_sliding_window", "only false")
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise fields.refusal("layer_types", "only full_attention")


def qwen2_shapes(config: ModelConfig, input_size: int | None = None) -> Shapes:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases: Shapes = {
        "self_attn.q_proj.bias": (q_size,),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
    }
    return llama.layer_shapes(config, input_size) | biases


def qwen3_shapes(config: ModelConfig, input_size: int | None = None) -> Shapes:
    norms: Shapes = {
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    return llama.layer_shapes(config, input_size) | norms


def qwen2_weights(read: ReadTensor) -> LayerWeights:
    bias = concat(read, "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
    return replace(llama.layer_weights(read), qkv_bias=bias)


def qwen3_weights(read: ReadTensor) -> LayerWeights:
    q_norm, k_norm = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
    return replace(llama.layer_weights(read), q_norm=q_norm, k_norm=k_norm)
