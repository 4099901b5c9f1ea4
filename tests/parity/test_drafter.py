"""The drafter against an independent reference: listening, then speaking, equals the whole sequence at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parity.draft_files import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NUM_AUX,
    RAW,
    VOCAB,
    draft_tensors,
    renamed,
    speculators,
    write,
)
from parity.eagle3_reference import Reference
from parity.paged_feed import PagedFeed
from wingbeat.models.decoder import DecoderModel
from wingbeat.models.eagle3 import Eagle3Drafter
from wingbeat.models.load import load_drafter, load_target
from wingbeat.models.random import random_target
from wingbeat.models.resolve import DEFAULT_DRAFTER


def make_target(dtype: torch.dtype = torch.float32) -> DecoderModel:
    return random_target(num_layers=4, hidden_size=HIDDEN, vocab_size=VOCAB, dtype=dtype)


def make_reference(target: DecoderModel, tensors: dict[str, Tensor], **flags: bool) -> Reference:
    return Reference(tensors, target.embedding, HEADS, KV_HEADS, HEAD_DIM, theta=5000.0, eps=1e-5, **flags)


def listen_then_speak(drafter: Eagle3Drafter, aux: Tensor, tokens: Tensor, listened: int) -> tuple[Tensor, Tensor]:
    """Entries of the first `listened` tokens by listening, the others by forward.

    The reference pairs token j with aux row j, listening with the row before it: hence one token more in front.
    """
    feed = PagedFeed(drafter.info, first_slot=1)
    feed.hear(drafter, aux[: listened + 1], [0, *tokens[:listened].tolist()])
    feed.lens[0] += listened
    return drafter.forward(drafter.fuse(aux)[listened:], feed.batch([tokens[listened:].tolist()]), feed.pool)


def check_against(reference: Reference, drafter: Eagle3Drafter, atol: float = 1e-4) -> None:
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(21, NUM_AUX * HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (21,), generator=generator)
    wanted_logits, wanted_hidden = reference(aux, tokens)
    for listened in (0, 1, 13, 20):
        logits, hidden = listen_then_speak(drafter, aux, tokens, listened)
        torch.testing.assert_close(logits, wanted_logits[listened:], atol=atol, rtol=1e-4)
        torch.testing.assert_close(hidden, wanted_hidden[listened:], atol=atol, rtol=1e-4)


def test_raw_layout(tmp_path: Path) -> None:
    target, tensors = make_target(), draft_tensors()
    drafter = load_drafter(write(tmp_path, RAW, tensors), target)
    assert drafter.aux_layer_ids == (1, 2, 4)
    assert drafter.draft_vocab_size == DRAFT_VOCAB
    assert torch.equal(drafter.target_ids, tensors["t2d"].nonzero()[:, 0])
    check_against(make_reference(target, tensors), drafter)


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_before_residual": False, "norm_output": True},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True},
    ],
    ids=lambda flags: "+".join(name for name, on in flags.items() if on),
)
def test_speculators_layout_and_every_switch(flags: dict[str, bool], tmp_path: Path) -> None:
    extra: dict[str, tuple[int, ...]] = {}
    if flags.get("fc_norm"):
        extra = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(NUM_AUX)}
    if flags.get("norm_before_fc"):
        extra = {"input_norm.weight": (NUM_AUX * HIDDEN,)}
    target, tensors = make_target(), draft_tensors(extra)
    drafter = load_drafter(write(tmp_path, speculators(**flags), renamed(tensors)), target)
    assert drafter.aux_layer_ids == (1, 2, 4)
    check_against(make_reference(target, tensors, **flags), drafter)


def test_speculators_says_nothing_of_the_residual(tmp_path: Path) -> None:
    target, tensors = make_target(), draft_tensors()
    drafter = load_drafter(write(tmp_path, speculators(), renamed(tensors)), target)
    check_against(make_reference(target, tensors, norm_before_residual=True), drafter)


def test_own_embedding_is_used(tmp_path: Path) -> None:
    target, tensors = make_target(), draft_tensors({"embed_tokens.weight": (VOCAB, HIDDEN)})
    drafter = load_drafter(write(tmp_path, RAW, tensors), target)
    check_against(replace(make_reference(target, tensors), embedding=tensors["embed_tokens.weight"]), drafter)


@pytest.mark.parametrize("own_head", [True, False])
def test_full_vocabulary(own_head: bool, tmp_path: Path) -> None:
    target, tensors = make_target(), draft_tensors({"lm_head.weight": (VOCAB, HIDDEN)})
    stored = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if not own_head:
        tensors["lm_head.weight"] = target.output_weight
        del stored["lm_head.weight"]
    drafter = load_drafter(write(tmp_path, {**RAW, "draft_vocab_size": None}, stored), target)
    assert torch.equal(drafter.target_ids, torch.arange(VOCAB))
    check_against(make_reference(target, tensors), drafter)


def test_wanted_rows_only(tmp_path: Path) -> None:
    drafter = load_drafter(write(tmp_path, RAW, draft_tensors()), make_target())
    feed, hidden = PagedFeed(drafter.info, first_slot=1), torch.randn(5, HIDDEN)
    every, next_hidden = drafter.forward(hidden, feed.batch([[1, 2, 3, 4, 5]]), feed.pool)
    last, same_hidden = drafter.forward(hidden, feed.batch([[1, 2, 3, 4, 5]], logit_rows=[4]), feed.pool)
    torch.testing.assert_close(last, every[4:])
    torch.testing.assert_close(same_hidden, next_hidden)


def test_shipped_drafter_on_the_embedded_target() -> None:
    """Real weights in float32, real features: first-step logits equal the reference's."""
    target = load_target(load_target_directory(), dtype=torch.float32)
    drafter = load_drafter("default", target)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in shipped_tensors().items()}
    reference = Reference(tensors, target.embedding, 9, 3, 64, theta=100000.0, eps=drafter_eps())
    ids = torch.randint(17, 49152, (24,), generator=torch.Generator().manual_seed(1))
    feed = PagedFeed(target.info)
    out = target.forward(feed.batch([ids.tolist()]), feed.pool, capture=drafter.aux_layer_ids)
    assert out.aux is not None
    wanted_logits, wanted_hidden = reference(out.aux[:-1], ids[1:])
    logits, hidden = listen_then_speak(drafter, out.aux[:-1], ids[1:], 15)
    torch.testing.assert_close(logits, wanted_logits[15:], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(hidden, wanted_hidden[15:], atol=2e-3, rtol=1e-3)


def load_target_directory() -> Path:
    """The bfloat16 conversion, read as float32: no second copy in the cache."""
    from wingbeat.models.resolve import resolve_model

    return resolve_model("smollm2")


def shipped_tensors() -> dict[str, Tensor]:
    return load_file(DEFAULT_DRAFTER / "model.safetensors")


def drafter_eps() -> float:
    eps = json.loads((DEFAULT_DRAFTER / "config.json").read_text())["rms_norm_eps"]
    assert isinstance(eps, float)
    return eps
