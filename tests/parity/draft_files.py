"""Drafter checkpoints for tests: random tensors in the raw layout, and their translation to the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, DRAFT_VOCAB, NUM_AUX = 64, 4, 2, 24, 96, 200, 120, 3
LAYER: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "dtype": "float32",
}
RAW: dict[str, object] = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
}
SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (HIDDEN, NUM_AUX * HIDDEN),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
}


def draft_tensors(extra: dict[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    """Random raw tensors with d2t and t2d over a random draft vocabulary; `extra` names more of them."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, shape in {**SHAPES, **(extra or {})}.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else 0.2 * noise
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(directory: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's and speculators' names."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def speculators(**flags: bool) -> dict[str, object]:
    """The speculators layout of RAW's config."""
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": LAYER,
        **flags,
    }
