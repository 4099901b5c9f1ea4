"""Proofs 1, 2 and 3: speculation changes no token - greedy, sampled, or with another plan at every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import PLANS, engine, prompts, run, run_with_logprobs

from wingbeat.engine import build
from wingbeat.engine.engine import Engine
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.types import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=32),
    SamplingParams(temperature=1.0, top_k=20, seed=2, max_tokens=32, n=3),
    SamplingParams(temperature=0.7, min_p=0.02, seed=3, max_tokens=32, repetition_penalty=1.3),
    SamplingParams(temperature=0.6, seed=4, max_tokens=32, presence_penalty=0.8, frequency_penalty=0.5),
    SamplingParams(temperature=1.2, seed=5, max_tokens=32, min_tokens=20, top_k=40, top_p=0.95),
    SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.2, frequency_penalty=0.7),
    SamplingParams(temperature=0.5, seed=6, max_tokens=32, logit_bias={9: 4.0, 11: -100.0}, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=(33, 34, 35, 36), min_tokens=4),
]
TEXTS = prompts(len(SAMPLED))


@pytest.fixture(scope="module")
def plain_greedy():
    with engine(drafter=False) as built:
        return run_with_logprobs(built, TEXTS, [GREEDY] * len(TEXTS))


def check_greedy(built: Engine, plain_greedy) -> None:
    tokens, logprobs = run_with_logprobs(built, TEXTS, [GREEDY] * len(TEXTS))
    assert tokens == plain_greedy[0]
    for key, wanted in plain_greedy[1].items():
        assert logprobs[key] == pytest.approx(wanted, abs=1e-5)  # float32 logprobs


@pytest.fixture(scope="module")
def plain_sampled():
    with engine(drafter=False) as built:
        return run(built, TEXTS, SAMPLED)


@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_greedy_equals_plain(plan: Rule | str, loop: str, plain_greedy) -> None:
    with engine(plan, loop=loop) as built:
        check_greedy(built, plain_greedy)
        if plan != OFF:
            assert built.metrics().num_accepted_tokens > 20, "the drafter must really be accepted at times"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_rows", [7, 512])
@pytest.mark.parametrize("plan", [OFF, chain(3), tree(5, 4, 16)], ids=str)
def test_page_size_and_prefill_split_do_not_matter(page_size: int, max_rows: int, plan: Rule, plain_greedy) -> None:
    with engine(plan, page_size=page_size, max_rows=max_rows) as built:
        check_greedy(built, plain_greedy)


@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_pages_of_one_token_hold_every_unread_step(plan: Rule | str, plain_greedy) -> None:
    """The smallest pages and prefill chunks, one step ahead of the host: a bound that is one short writes elsewhere."""
    with engine(plan, page_size=1, max_rows=7, loop="overlapped") as built:
        check_greedy(built, plain_greedy)


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_sampled_equals_plain(plan: Rule | str, loop: str, plain_sampled) -> None:
    with engine(plan, loop=loop) as built:
        assert run(built, TEXTS, SAMPLED) == plain_sampled


def test_choices_of_one_request_differ(plain_sampled) -> None:
    assert len({tuple(plain_sampled["r1", choice]) for choice in range(3)}) == 3


@pytest.fixture
def no_spare_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and requests press on the same pages, so that requests are preempted in both loops."""
    monkeypatch.setattr(build, "SPARE_SLOTS", 0)


@pytest.mark.usefixtures("no_spare_pages")
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_with_arrivals_preemption_and_prefix_hits(loop: str, seed: int) -> None:
    check_under_pressure("random", loop, seed)


@pytest.mark.usefixtures("no_spare_pages")
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_one_plan_with_arrivals_preemption_and_prefix_hits(plan: Rule) -> None:
    check_under_pressure(plan, "overlapped", seed=0)


def check_under_pressure(plan: Rule | str, loop: str, seed: int) -> None:
    """A small pool (preemption), requests that arrive mid-run, and prompts that share prefixes."""
    base = prompts(4, seed=seed, longest=40)
    texts = [*base, *(text[: len(text) * 3 // 4] + (9,) for text in base), *base]
    params = [SAMPLED[i % len(SAMPLED)] for i in range(len(texts))]
    with engine(drafter=False, lanes=16) as built:
        plain = run(built, texts, params)
    with engine(plan, num_pages=8, max_rows=24, loop=loop, lanes=6, max_model_len=96) as built:
        mixed = run(built, texts, params, stagger=3)
        metrics = built.metrics()
    assert mixed == plain
    assert metrics.preemptions > 0 and metrics.prefix_hit_tokens > 0
    assert (metrics.num_accepted_tokens > 0) == (plan != OFF)


def test_request_caps_hold_and_change_nothing(plain_greedy) -> None:
    caps = [0, 1, 2, None, 0, 3, 1, 7]
    params = [replace(GREEDY, max_draft_depth=cap) for cap in caps]
    with engine(chain(5)) as built:
        stats = {}
        for i, (text, each) in enumerate(zip(TEXTS, params, strict=True)):
            built.add(Request(request_id=f"r{i}", prompt_token_ids=text, params=each))
        tokens: dict = {}
        while built.has_work():
            for delta in built.step():
                tokens.setdefault((delta.request_id, 0), []).extend(delta.token_ids)
                if delta.stats is not None:
                    stats[delta.request_id] = delta.stats
    assert tokens == plain_greedy[0]
    for i, cap in enumerate(caps):
        assert len(stats[f"r{i}"].drafted_per_pos) <= (5 if cap is None else cap)
    assert stats["r0"].num_draft_tokens == 0 and stats["r3"].num_draft_tokens > 0
