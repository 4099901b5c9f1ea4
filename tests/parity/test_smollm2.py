"""The embedded default against transformers' own reading of the same GGUF file: weights, logits, tokens, prompts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from parity.paged_feed import PagedFeed
from wingbeat.models.load import load_target
from wingbeat.models.resolve import resolve_model, smollm2_file
from wingbeat.text.tokenizer import Tokenizer

read_gguf: Any = load_gguf_checkpoint  # untyped in transformers
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "attn_implementation": "eager",
}
TEXTS = [
    "def add(a: int, b: int) -> int:\n    return a + b  # 12345",
    "Gr\u00fc\u00dfe, \u4e16\u754c! \U0001f600\ufe0f  tabs\tand   spaces \n\n end",
    "<|im_start|>user\nIt's 3.14159 o'clock<|im_end|>",
    " 2048\u00b2 x\u0301",
]


@lru_cache(maxsize=1)
def reference() -> Any:
    """transformers' LlamaForCausalLM from the GGUF, rounded to bfloat16 as our conversion is, computing in float32."""
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2))
    tensors = read_gguf(str(smollm2_file()), return_tensors=True, model_to_load=model)["tensors"]
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(rounded, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@lru_cache(maxsize=1)
def reference_tokenizer() -> Any:
    file = smollm2_file()
    return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("smollm2")


@pytest.mark.slow
def test_logits_equal_transformers_in_float32(directory: Path) -> None:
    target = load_target(directory, dtype=torch.float32)
    ids = Tokenizer.for_model(directory).encode(TEXTS[0] + TEXTS[1])
    feed, logits = PagedFeed(target.info), []
    for chunk in (ids[:20], ids[20:-3], *([token] for token in ids[-3:])):
        logits.append(target.forward(feed.batch([chunk]), feed.pool).logits)
        feed.commit([chunk])
    with torch.no_grad():
        wanted = reference()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.cat(logits), wanted, atol=2e-3, rtol=1e-3)


def test_the_whole_config_is_read(directory: Path) -> None:
    info = load_target(directory).info
    assert info.dtype == torch.bfloat16
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (9, 3, 64)
    assert info.max_position_embeddings == 8192
    assert info.eos_token_ids == (2,)
    assert len(info.digest) == 16


def test_tokens_equal_transformers(directory: Path) -> None:
    theirs = reference_tokenizer()
    ours = Tokenizer.for_model(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_prompts_equal_transformers(directory: Path) -> None:
    theirs = reference_tokenizer()
    template = Tokenizer.for_model(directory).template
    assert template is not None
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> "}],
    ):
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == wanted
    assert template.render([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>system\nYou are a helpful AI")
