"""Drafter configs: both layouts, both numberings of the aux layers, and whether a drafter fits its target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wingbeat.errors import CheckpointError
from wingbeat.models.draft_vocab import check_mask, target_ids_from_offsets
from wingbeat.models.eagle3_config import DraftConfig, fit_to_target, read_draft_config
from wingbeat.models.fields import Fields
from wingbeat.models.interface import ModelInfo

LAYER: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = ModelInfo(
    architecture="LlamaForCausalLM",
    num_layers=12,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=128,
    vocab_size=100,
    max_position_embeddings=512,
    dtype=torch.float32,
    eos_token_ids=(),
    digest="",
)


def raw(**changes: object) -> DraftConfig:
    return read_draft_config(Fields({**LAYER, "draft_vocab_size": 50, **changes}, "config.json"))


def speculators(layer: dict[str, object] | None = None, **changes: object) -> DraftConfig:
    nested = {**LAYER, **(layer or {})}
    values = {"draft_vocab_size": 50, "speculators_model_type": "eagle3", "transformer_layer_config": nested}
    return read_draft_config(Fields({**values, **changes}, "config.json"))


def test_aux_ids_in_both_numberings() -> None:
    assert raw(**{IDS: [2, 6, 9]}).aux_layer_ids == (2, 6, 9)
    assert raw(eagle_config={IDS: [1, 5, 8]}).aux_layer_ids == (2, 6, 9)
    assert raw(**{IDS: [2, 6, 9]}, eagle_config={IDS: [1, 5, 8]}).aux_layer_ids == (2, 6, 9)
    assert fit_to_target(raw(), TARGET) == (2, 6, 9)


def test_disagreeing_numberings_are_refused_naming_both() -> None:
    with pytest.raises(CheckpointError, match=r"\[2, 6, 9\].*eagle_config.*\[2, 6, 9\].*one lower"):
        raw(**{IDS: [2, 6, 9]}, eagle_config={IDS: [2, 6, 9]})


def test_raw_and_speculators_defaults_differ() -> None:
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [getattr(raw(), flag) for flag in flags] == [False] * 4
    assert [getattr(speculators(), flag) for flag in flags] == [True, False, False, False]
    assert raw(eagle_config={"norm_before_fc": True}).norm_before_fc


def test_an_idle_window_is_accepted() -> None:
    assert raw(sliding_window=2048, layer_types=["full_attention"]).layer.num_layers == 1
    assert raw(sliding_window=2048, model_type="qwen3").layer.num_layers == 1


def test_null_draft_vocabulary_is_the_whole_one() -> None:
    assert raw(draft_vocab_size=None).draft_vocab_size == 100


def test_qwen3_layer_has_norms() -> None:
    assert speculators({"model_type": "qwen3"}).layer.qk_norm
    assert not speculators({"model_type": "llama"}).layer.qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, r"num_hidden_layers=2 .*only 1"),
        ({"bias": True}, "bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"fc_norm": True, "norm_before_fc": True}, "not both"),
        ({"model_type": "gpt_oss"}, "model_type='gpt_oss'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types="),
        ({"sliding_window": 2048}, "sliding_window=2048"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False .*EAGLE-1"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
        ({IDS: [2, "6"]}, "integers >= 0"),
    ],
)
def test_unsupported_variants_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        raw(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, r"target_hidden_size=128 does not fit.*has 64"),
        ({"target_hidden_size": 32}, r"target_hidden_size=32 does not fit.*has 64"),
        ({"vocab_size": 101}, r"vocab_size=101 does not fit.*has 100"),
        ({"draft_vocab_size": 101}, r"draft_vocab_size=101 exceeds the target's 100"),
        ({IDS: [2, 6, 13]}, r"\[2, 6, 13\] does not fit a target of 12 layers: .*0 to 12"),
        ({IDS: [6, 2, 9]}, "rising ids"),
        ({IDS: [2, 2, 9]}, "rising ids"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit_to_target(raw(**changes), TARGET)


def test_shallow_targets_need_explicit_ids() -> None:
    shallow = replace(TARGET, num_layers=2)
    with pytest.raises(CheckpointError, match=r"\[2, 1, -1\] does not fit"):
        fit_to_target(raw(), shallow)
    assert fit_to_target(raw(**{IDS: [0, 1, 2]}), shallow) == (0, 1, 2)


def test_offsets_become_absolute_ids() -> None:
    assert target_ids_from_offsets(torch.tensor([0, 4, 4, 6]), 10).tolist() == [0, 5, 6, 9]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 4, 7], "from 0 to 10, expected 0..9"),
        ([-1, 4], "from -1 to 5"),
        ([3, 2, 0], "draft id 1 maps to 3"),
    ],
)
def test_wrong_offsets_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        target_ids_from_offsets(torch.tensor(offsets), 10)


def test_mask_and_offsets_must_agree() -> None:
    ids, mask = torch.tensor([1, 3]), torch.tensor([False, True, False, True])
    check_mask(mask, ids)
    with pytest.raises(CheckpointError, match="t2d marks 3 tokens, d2t maps 2, of which 0"):
        check_mask(mask.index_fill(0, torch.tensor([0]), True), ids)
    with pytest.raises(CheckpointError, match="t2d marks 2 tokens, d2t maps 2, of which 1"):
        check_mask(mask, torch.tensor([1, 2]))
