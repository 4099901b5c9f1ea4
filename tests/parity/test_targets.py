"""Targets against transformers: same files, same logits and hidden states, prefilled in chunks and then decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from parity.paged_feed import PagedFeed
from wingbeat.models.decoder import DecoderModel
from wingbeat.models.load import load_target

SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
Reference = Any
"""A transformers model: untyped there, and used as a black box here."""
Rows = tuple[Tensor, Tensor]


def make_reference(case: str, directory: Path, shard: str = "1GB") -> Reference:
    """A random transformers model, saved to `directory`. Every parameter is far from its initial value."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        scale, centre = (0.2, 1.0) if "norm" in name else (0.3, 0.0) if "bias" in name else (0.15, 0.0)
        torch.nn.init.normal_(parameter, centre, scale)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@torch.no_grad()
def reference_run(model: Reference, ids: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [T, V] and the hidden states entering each layer (the last one: after the final norm)."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_in_chunks(model: DecoderModel, sequences: list[list[int]], cuts: list[int]) -> list[list[Rows]]:
    """Feeds all sequences cut at the same places; per chunk and sequence: logits and aux features."""
    feed, outputs = PagedFeed(model.info, len(sequences)), []
    capture = tuple(range(model.info.num_layers + 1))
    for start, end in zip([0, *cuts], [*cuts, None], strict=True):
        chunk = [ids[start:end] for ids in sequences]
        out = model.forward(feed.batch(chunk), feed.pool, capture=capture)
        feed.commit(chunk)
        assert out.aux is not None
        counts = [len(ids) for ids in chunk]
        pairs = zip(torch.split(out.logits, counts), torch.split(out.aux, counts), strict=True)
        outputs.append(list(pairs))
    return outputs


@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states_match_transformers(case: str, tmp_path: Path) -> None:
    reference = make_reference(case, tmp_path)
    model = load_target(tmp_path)
    sequences = [tokens(43, 1), tokens(43, 2)]
    outputs = run_in_chunks(model, sequences, [1, 18, 31, *range(32, 43)])
    for seq, ids in enumerate(sequences):
        logits, states = reference_run(reference, ids)
        ours = torch.cat([chunk[seq][0] for chunk in outputs])
        torch.testing.assert_close(ours, logits, atol=2e-4, rtol=1e-4)
        aux = torch.cat([chunk[seq][1] for chunk in outputs])
        *entering, last = aux.chunk(model.info.num_layers + 1, dim=-1)
        for mine, theirs in zip(entering, states, strict=False):
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(reference.model.norm(last), states[-1], atol=2e-4, rtol=1e-4)


def test_bfloat16_agrees_with_the_reference_in_float32(tmp_path: Path) -> None:
    reference = make_reference("qwen3", tmp_path)
    model = load_target(tmp_path, dtype=torch.bfloat16)
    ids = tokens(30, 5)
    feed = PagedFeed(model.info)
    ours = model.forward(feed.batch([ids]), feed.pool).logits
    wanted, _ = reference_run(reference, ids)
    assert ours.dtype == torch.float32
    assert float((ours - wanted).abs().max() / wanted.std()) < 0.15


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    make_reference("llama", tmp_path / "one")
    make_reference("llama", tmp_path / "many", shard="60KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = load_target(tmp_path / "one"), load_target(tmp_path / "many")
    feed = PagedFeed(one.info)
    batch = feed.batch([tokens(9, 4)])
    assert torch.equal(one.forward(batch, feed.pool).logits, many.forward(batch, feed.pool).logits)


def old_rope(values: dict[str, object]) -> None:
    rope = values.pop("rope_parameters")
    assert isinstance(rope, dict)
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope


def older_rope(values: dict[str, object]) -> None:
    old_rope(values)
    scaling = values["rope_scaling"]
    assert isinstance(scaling, dict)
    scaling["type"] = scaling.pop("rope_type")


@pytest.mark.parametrize("rewrite", [old_rope, older_rope])
def test_both_rope_spellings_mean_the_same(rewrite: Callable[[dict[str, object]], None], tmp_path: Path) -> None:
    make_reference("llama-llama3", tmp_path)
    new = load_target(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rewrite(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    old = load_target(tmp_path)
    feed = PagedFeed(new.info)
    batch = feed.batch([tokens(40, 6)])
    assert torch.equal(new.forward(batch, feed.pool).logits, old.forward(batch, feed.pool).logits)


def test_only_wanted_rows_are_projected(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    model = load_target(tmp_path)
    feed, ids = PagedFeed(model.info), tokens(9, 8)
    every = model.forward(feed.batch([ids]), feed.pool)
    some = model.forward(feed.batch([ids], logit_rows=[8, 2]), feed.pool)
    none = model.forward(feed.batch([ids], logit_rows=[]), feed.pool, capture=(1,))
    torch.testing.assert_close(some.logits, every.logits[[8, 2]])
    assert none.logits.shape == (0, 160)
    assert none.logits.dtype == torch.float32
    assert none.aux is not None
    assert none.aux.shape == (9, 64)
    assert every.aux is None


def test_float64_stays_float64(tmp_path: Path) -> None:
    reference = make_reference("qwen2", tmp_path)
    model = load_target(tmp_path, dtype=torch.float64)
    feed, ids = PagedFeed(model.info), tokens(9, 9)
    logits = model.forward(feed.batch([ids]), feed.pool).logits
    assert logits.dtype == torch.float64
    wanted, _ = reference_run(reference.double(), ids)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
