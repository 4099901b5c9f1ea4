"""config.json: what is read, and what is refused with field, value and reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wingbeat.errors import CheckpointError
from wingbeat.models.config import ModelConfig
from wingbeat.models.fields import Fields, read_json
from wingbeat.models.registry import read_model_config
from wingbeat.models.rope import RopeConfig

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 8],
}


def read(**changes: object) -> ModelConfig:
    return read_model_config(Fields({**BASE, **changes}, "config.json"))


def test_defaults() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (7, 8)
    assert not config.tied


def test_null_is_absent() -> None:
    config = read(head_dim=None, rope_scaling=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_mistral_window_caps_the_context() -> None:
    assert read(architectures=["MistralForCausalLM"], sliding_window=128).max_position_embeddings == 128
    assert read(architectures=["MistralForCausalLM"], sliding_window=4096).max_position_embeddings == 512
    assert read(architectures=["MistralForCausalLM"], sliding_window=None).max_position_embeddings == 512


def test_qwen_switches() -> None:
    qwen2 = read(architectures=["Qwen2ForCausalLM"], sliding_window=16, use_sliding_window=False)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.max_position_embeddings) == (True, False, 512)
    qwen3 = read(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size=0 .*integer >= 1"),
        ({"hidden_size": "64"}, r"hidden_size='64'"),
        ({"hidden_size": None}, r"hidden_size=None"),
        ({"num_attention_heads": True}, r"num_attention_heads=True"),
        ({"num_attention_heads": 5}, r"num_attention_heads=5 .*divisor of hidden_size=64"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3 .*divisor of num_attention_heads=4"),
        ({"head_dim": 15}, r"head_dim=15 .*even"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' .*only silu"),
        ({"attention_bias": True}, r"attention_bias=True .*only false"),
        ({"mlp_bias": True}, r"mlp_bias=True"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes' .*true or false"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.*unquantised"),
        ({"torch_dtype": "int8"}, r"torch_dtype='int8' .*bfloat16"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling: type='yarn' .*linear or llama3"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"factor=None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"rope_theta": -1}, r"rope_theta=-1 .*> 0"),
        ({"eos_token_id": "2"}, r"eos_token_id='2'"),
        ({"architectures": None}, r"architectures=None .*list of one name"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"as a target \(it is a drafter\)"),
        ({"architectures": ["MixtralForCausalLM"]}, r"mixture-of-experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, r"mixture-of-experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, r"MLA"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"'GPT2LMHeadModel' is not supported; supported: Llama"),
        ({"architectures": ["Qwen25ForCausalLM"]}, r"did you mean Qwen"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, r"use_sliding_window=True"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]}, r"layer_types="),
    ],
)
def test_refusals_name_field_value_and_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*") as caught:
        read(**changes)
    assert caught.match(message)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[]", "expected a JSON object"), (None, "no such file")]
)
def test_unreadable_files(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(path)
