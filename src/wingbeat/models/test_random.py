"""Random models are reproducible, sharp, and their drafters agree with them often but not always."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.errors import CheckpointError
from wingbeat.models.interface import ModelInfo
from wingbeat.models.random import dummy_target, random_drafter, random_target, spread_ids
from wingbeat.models.registry import ARCHITECTURES


def causal(ids: Tensor) -> ForwardBatch:
    """One sequence without context."""
    count = ids.numel()
    return ForwardBatch(
        input_ids=ids,
        positions=torch.arange(count),
        cu_rows=torch.tensor([0, count], dtype=torch.int32),
        key_starts=torch.zeros(1, dtype=torch.int32),
        key_lens=torch.tensor([count], dtype=torch.int32),
        scratch_slots=torch.arange(count),
        context_lens=torch.zeros(1, dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        page_size=16,
    )


def pool(info: ModelInfo) -> KVPool:
    return KVPool.allocate(
        num_layers=info.num_layers,
        num_slots=16,
        num_scratch_rows=128,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        device=torch.device("cpu"),
    )


def tokens(count: int = 100) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_reproducible(architecture: str) -> None:
    batch = causal(tokens(12))
    first, again, other = (random_target(architecture, seed=seed) for seed in (3, 3, 4))
    logits = [model.forward(batch, pool(model.info)).logits for model in (first, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert first.info.digest == again.info.digest != other.info.digest
    assert first.info.architecture == architecture


def test_context_matters_and_ties_are_rare() -> None:
    target, ids = random_target(), tokens()
    logits = target.forward(causal(ids), pool(target.info)).logits
    alone = torch.cat([target.forward(causal(ids[i : i + 1]), pool(target.info)).logits for i in range(50, 60)])
    assert float((logits[50:60] - alone).abs().max()) > 1.0
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).quantile(0.1)) > 1e-2


@pytest.mark.parametrize("draft_vocab_size", [None, 200])
def test_drafters_agree_often_but_not_always(draft_vocab_size: int | None) -> None:
    target, ids = random_target(), tokens()
    drafter = random_drafter(target, draft_vocab_size=draft_vocab_size)
    out = target.forward(causal(ids), pool(target.info), capture=drafter.aux_layer_ids)
    assert out.aux is not None
    hidden, batch = drafter.fuse(out.aux[:-1]), causal(ids[1:])
    wanted = out.logits.argmax(-1)[1:]
    for _ in range(2):
        logits, hidden = drafter.forward(hidden, batch, pool(drafter.info))
        assert logits.shape[1] == (draft_vocab_size or 256)
        agreement = (drafter.target_ids[logits.argmax(-1)] == wanted).float().mean()
        assert 0.25 < float(agreement) < 0.8
        hidden, batch, wanted = hidden[:-1], causal(batch.input_ids[1:]), wanted[1:]


def test_disagreeing_drafters_exist() -> None:
    target, ids = random_target(), tokens()
    drafter = random_drafter(target, agreeing=False, num_kv_heads=1)
    out = target.forward(causal(ids), pool(target.info), capture=drafter.aux_layer_ids)
    assert out.aux is not None
    logits, _ = drafter.forward(drafter.fuse(out.aux[:-1]), causal(ids[1:]), pool(drafter.info))
    assert float((logits.argmax(-1) == out.logits.argmax(-1)[1:]).float().mean()) < 0.1


def test_spread_ids_rise_within_the_vocabulary() -> None:
    ids = spread_ids(7, 20)
    assert ids.tolist() == [0, 2, 5, 8, 11, 14, 17]


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = dummy_target(tmp_path, dtype=torch.bfloat16)
    logits = target.forward(causal(tokens(5)), pool(target.info)).logits
    assert logits.shape == (5, 256)
    assert bool(logits.isfinite().all())


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(CheckpointError, match="did you mean LlamaForCausalLM"):
        random_target("LlamaForCausalLn")
