"""Proof 4: the drafter never goes stale - not while off, not in prefill, not over a prefix hit or a preemption.

Exactly, on small models: what the drafter knows is what it would know had it read the whole text at once. And in
effect, on the embedded model with the shipped drafter: acceptance after a time of `off` is that of never having been
off. A drafter that does not listen fails the second by far, so the bound can be failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.resources import files

import pytest
import torch
from rig import PLANS, engine, models, prompts
from torch import Tensor

from parity.paged_feed import PagedFeed
from wingbeat.engine.config import EngineConfig
from wingbeat.engine.engine import Engine
from wingbeat.spec.plan import Rule
from wingbeat.types import ChoiceDelta, Request, SamplingParams

LOOK = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True)


def listened(built: Engine, lane: int) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Tokens in pages of a lane, the drafter's K and V of tokens 1.. [n-1, Hk, D], and the carried feature [H]."""
    stepper = built._core.stepper
    lanes, listener, size = stepper.lanes, stepper.listener, built.config.block_size
    assert listener is not None
    at = torch.arange(int(lanes.context_lens[lane]))
    slots = lanes.page_table[lane].long()[at // size] * size + at % size
    tokens = lanes.sampling.history[lane, : at.numel()].tolist()
    return tokens, listener._pool.k[0, slots[1:]], listener._pool.v[0, slots[1:]], lanes.feature[lane]


def read_at_once(tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The same K, V and feature from one forward of the target over all tokens."""
    target, drafter = models()
    feed, ear = PagedFeed(target.info), PagedFeed(drafter.info)
    aux = target.forward(feed.batch([tokens]), feed.pool, capture=drafter.aux_layer_ids).aux
    assert aux is not None
    carried = ear.hear(drafter, aux, tokens)
    slots = ear.slots(0, 1, len(tokens) - 1)
    return ear.pool.k[0, slots], ear.pool.v[0, slots], carried


def check_listened(built: Engine, lane: int) -> int:
    tokens, *found = listened(built, lane)
    for mine, wanted in zip(found, read_at_once(tokens), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
    return len(tokens)


def add(built: Engine, name: str, text: tuple[int, ...], params: SamplingParams) -> None:
    built.add(Request(request_id=name, prompt_token_ids=text, params=params))


def finish(built: Engine) -> None:
    while built.has_work():
        built.step()


@pytest.mark.parametrize("max_rows", [7, 512])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_what_the_drafter_knows_is_what_one_reading_gives(plan: Rule | str, max_rows: int) -> None:
    texts = prompts(3, seed=5, longest=40)
    with engine(plan, page_size=4, max_rows=max_rows) as built:
        for i, text in enumerate(texts):
            add(built, f"r{i}", text, LOOK)
        finish(built)
        assert [check_listened(built, lane) for lane in range(3)] == [len(text) + 44 for text in texts]


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_three_penalised_choices_are_heard(plan: Rule | str, loop: str) -> None:
    """They share the prompt's pages; each has its own lane, tokens and feature."""
    text = prompts(1, seed=9, longest=40)[0]
    penalised = replace(
        LOOK, temperature=0.8, seed=1, n=3, min_tokens=10, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=0.5,
    )  # fmt: skip
    with engine(plan, page_size=4, loop=loop) as built:
        add(built, "r", text, penalised)
        finish(built)
        assert [check_listened(built, lane) for lane in range(3)] == [len(text) + 44] * 3
        assert len({tuple(listened(built, lane)[0]) for lane in range(3)}) == 3


@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_a_prefix_hit_leaves_no_hole(plan: Rule | str) -> None:
    text = prompts(1, seed=8, longest=60)[0] * 3
    with engine(plan, page_size=4) as built:
        for name, tail in (("first", (9,)), ("second", (10, 11, 12))):
            add(built, name, text + tail, LOOK)
            finish(built)
        assert built.metrics().prefix_hit_tokens >= len(text) - 4
        assert check_listened(built, 0) == len(text) + 3 + 44


@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_a_preempted_sequence_listens_again(plan: Rule | str) -> None:
    texts = prompts(3, seed=6, longest=20)
    with engine(plan, page_size=4, num_pages=24, max_model_len=96, lanes=3) as built:
        for i, text in enumerate(texts):
            add(built, f"r{i}", text, LOOK)
        alive = {s.request.request_id: s for s in built._core.scheduler.waiting}
        checked: set[str] = set()
        while built.has_work():
            built.step()
            for name, each in alive.items():
                if each.lane >= 0 and each.num_preemptions and not each.is_prefilling and name not in checked:
                    check_listened(built, each.lane)
                    checked.add(name)
        assert checked, "nobody was preempted"


# -- acceptance of the shipped drafter -----------------------------------------------------------------------------

HALF, ANSWER, NUM_PROMPTS = 64, 128, 8
BOUND = 0.02
"""How much of its acceptance a drafter may lose by having been off."""


@dataclass
class Answer:
    """One request's tokens and its verified steps: tokens known before the step -> accepted drafts of 3."""

    tokens: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    def take(self, delta: ChoiceDelta) -> None:
        known, self.ended = len(self.tokens), delta.finish_reason is not None
        self.tokens.extend(delta.token_ids)
        if not self.ended and known + 4 <= ANSWER:  # the end cuts drafts
            self.steps[known] = len(delta.token_ids) - 1


@pytest.fixture(scope="module")
def shipped() -> Iterator[Engine]:
    built = Engine.from_config(EngineConfig(policy="off", max_num_seqs=NUM_PROMPTS, max_model_len=512, loop="plain"))
    yield built
    built.close()


def coding_prompts(built: Engine) -> list[tuple[int, ...]]:
    lines = (files("wingbeat.lab.suites") / "data" / "coding.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines[: 3 * NUM_PROMPTS : 3]]
    return [tuple(built.encode_chat(messages)) for messages in chats]


def forget(built: Engine) -> None:
    """Wipes the drafter's pages: the same answers may land where the last run's entries still lie."""
    listener = built._core.stepper.listener
    assert listener is not None
    listener._pool.k.zero_()
    listener._pool.v.zero_()


def answer_all(
    built: Engine, first: str, pause: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Answer]:
    """Greedy answers: policy `first` until each is half done, then always:chain(3).

    `pause` is entered once every prompt is read and left at the switch.
    """
    built.reset_prefix_cache()
    forget(built)
    built.set_policy(first)
    answers = [Answer() for _ in range(NUM_PROMPTS)]
    for i, text in enumerate(coding_prompts(built)):
        add(built, str(i), text, SamplingParams(temperature=0.0, max_tokens=ANSWER))

    def advance(at_least: int) -> None:
        while any(len(answer.tokens) < at_least and not answer.ended for answer in answers):
            for delta in built.step():
                answers[int(delta.request_id)].take(delta)

    advance(1)
    with pause():
        advance(HALF)
    built.set_policy("always:chain(3)")
    advance(ANSWER)
    return answers


def second_half(one: list[Answer], other: list[Answer]) -> tuple[float, float, int]:
    """Accepted drafts over offered ones in each, over steps that both made from the same token on; and their number.

    Steps need not begin at the same tokens right after the switch, but once they do they stay together.
    """
    common = [
        (mine.steps[at], yours.steps[at])
        for mine, yours in zip(one, other, strict=True)
        for at in sorted(mine.steps.keys() & yours.steps.keys())
        if at >= HALF + 4
    ]
    return sum(a for a, _ in common) / len(common) / 3, sum(b for _, b in common) / len(common) / 3, len(common)


@pytest.fixture(scope="module")
def never_off(shipped: Engine) -> list[Answer]:
    return answer_all(shipped, "always:chain(3)")


def test_acceptance_after_off_is_that_of_never_off(shipped: Engine, never_off: list[Answer]) -> None:
    after_off = answer_all(shipped, "off")
    assert [a.tokens for a in after_off] == [a.tokens for a in never_off]
    rate, fresh, num_steps = second_half(after_off, never_off)
    assert num_steps > 100 and fresh > 0.4
    assert rate >= (1 - BOUND) * fresh


def test_a_drafter_that_does_not_listen_while_off_fails_the_bound(shipped: Engine, never_off: list[Answer]) -> None:
    @contextmanager
    def deaf() -> Iterator[None]:
        """The drafter's K/V stays unwritten; the carried features go on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shipped._drafter, "listen", lambda *_: None)
            yield

    stale = answer_all(shipped, "off", deaf)
    assert [a.tokens for a in stale] == [a.tokens for a in never_off], "drafts never change the text"
    rate, fresh, num_steps = second_half(stale, never_off)
    assert num_steps > 80
    assert rate < (1 - BOUND) * fresh
