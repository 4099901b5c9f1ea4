"""Llama and Mistral: which tensors a decoder layer has, their shapes, and how they become LayerWeights.

Legend: H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wingbeat.kernels.interface import LayerWeights
from wingbeat.models.config import ModelConfig, read_decoder
from wingbeat.models.fields import Fields

ReadTensor = Callable[[str], Tensor]
Shapes = dict[str, tuple[int, ...]]


def read_llama(fields: Fields) -> ModelConfig:
    return read_decoder(fields, architecture="LlamaForCausalLM", qkv_bias=False, qk_norm=False, window=None)


def read_mistral(fields: Fields) -> ModelConfig:
    """A sliding window caps the usable positions: up to its size, sliding and full attention are the same."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return read_decoder(fields, architecture="MistralForCausalLM", qkv_bias=False, qk_norm=False, window=window)


def layer_shapes(config: ModelConfig, input_size: int | None = None) -> Shapes:
    """Tensor name (below the layer's prefix) -> shape; `input_size` is the width q, k and v read."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, input_size or config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, width),
        "self_attn.k_proj.weight": (kv_size, width),
        "self_attn.v_proj.weight": (kv_size, width),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def layer_weights(read: ReadTensor) -> LayerWeights:
    """One layer; `read` takes a name below the layer's prefix."""
    return LayerWeights(
        input_norm=read("input_layernorm.weight"),
        qkv=concat(read, "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o=read("self_attn.o_proj.weight"),
        post_norm=read("post_attention_layernorm.weight"),
        gate_up=concat(read, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=read("mlp.down_proj.weight"),
    )


def concat(read: ReadTensor, *names: str) -> Tensor:
    """Tensors one below the other, along their output dimension."""
    return torch.cat([read(name) for name in names], dim=0)
