"""A draft row never costs a page anybody needs: preemptions and prefix hits as in a boot without a drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

import pytest
import torch
from rig import PLANS, Outputs, engine, models, prompts, run

from wingbeat.engine import step
from wingbeat.engine.engine import Engine
from wingbeat.engine.pending import Pending
from wingbeat.engine.scheduler import MustDrain
from wingbeat.runtime.lanes import Lanes
from wingbeat.spec.block import Candidates
from wingbeat.spec.plan import OFF, Rule, StepPlan, chain, tree
from wingbeat.spec.propose import Speaker
from wingbeat.types import Request, SamplingParams

BANNED = 255
Propose = Callable[[Speaker, Lanes, torch.Tensor, StepPlan], Candidates]
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}


def shared_prefix_load(seed: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    source = random.Random(seed)
    base = prompts(3, seed=seed, longest=40)
    texts = [base[i % 3] + tuple(source.randrange(8, 250) for _ in range(source.randint(1, 8))) for i in range(18)]
    params = [SamplingParams(temperature=0.0, max_tokens=source.randint(8, 40), ignore_eos=True) for _ in texts]
    return texts, params


def pressed(plan: object, seed: int, **settings: object) -> tuple[Outputs, Engine]:
    texts, params = shared_prefix_load(seed)
    with engine(plan, num_pages=9, max_model_len=96, lanes=6, **settings) as built:  # type: ignore[arg-type]
        return run(built, texts, params), built


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_preemptions_under_always_are_not_more_than_under_off(loop: str) -> None:
    totals = {}
    for plan in (OFF, chain(3), tree(5, 4, 16)):
        results = [pressed(plan, seed, loop=loop) for seed in range(3)]
        totals[str(plan)] = sum(built.metrics().preemptions for _, built in results)
    assert totals["off"] > 0, "the pool must be small enough to press"
    assert totals["chain(3)"] <= totals["off"] and totals["tree(5,4,16)"] <= totals["off"], totals


def propose_nonsense(
    speaker: Speaker, lanes: Lanes, decode: torch.Tensor, plan: StepPlan, real: Propose = step.propose
) -> Candidates:
    """Drafts of a token that the requests ban."""
    candidates = real(speaker, lanes, decode, plan)
    candidates.token_ids[:, 1:] = BANNED
    return candidates


@dataclass
class Decided:
    """What a boot decided step by step, and the depth it drafted at."""

    outputs: Outputs
    steps: list[tuple[int, ...]]
    depths: list[int]


def decided(plan: Rule, seed: int, loop: str, *, drafter: bool, num_pages: int) -> Decided:
    """Per step: preemptions, prefix hits, pages given up, sequences decoding, rows of chunks, sequences waiting.

    () where an unread step had to be read first.
    """
    texts, params = shared_prefix_load(seed)
    params = [replace(each, logit_bias={BANNED: -100.0}) for each in params]
    found = Decided({}, [], [])
    with engine(plan, num_pages=num_pages, max_model_len=96, lanes=6, loop=loop, drafter=drafter) as built:
        core, given_up = built._core, []
        forget, prepare = built._prefix.pages._on_evict, core.prepare
        assert forget is not None

        def noted(page: int) -> None:
            given_up.append(page)
            forget(page)

        def prepared(*, unread: bool) -> Pending | None:
            try:
                pending = prepare(unread=unread)
            except MustDrain:
                found.steps.append(())
                raise
            if pending is not None:
                scheduler, chunks = core.scheduler, pending.step.prefills
                counts = (scheduler.num_preemptions, built._prefix.num_hit_tokens, len(pending.decode))
                more = (len(given_up), sum(chunk.num_rows for chunk in chunks), len(scheduler.waiting))
                found.steps.append((*counts, *more))
                found.depths += [pending.rule.depth] if pending.decode else []
            return pending

        built._prefix.pages._on_evict = noted
        core.prepare = prepared  # type: ignore[method-assign]
        found.outputs = run(built, texts, params, stagger=2)
    return found


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [chain(7), tree(5, 4, 16)], ids=str)
def test_refused_drafts_leave_every_decision_as_without_a_drafter(
    plan: Rule, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When drafts come to nothing, each step admits, preempts, evicts and decodes what a boot without a drafter does.

    And a pool full of reusable pages takes nothing from the drafts: they have spare pages of their own.
    """
    monkeypatch.setattr(step, "propose", propose_nonsense)
    given_up = 0
    for seed in range(2):
        wanted = decided(OFF, seed, loop, drafter=False, num_pages=18)
        found = decided(plan, seed, loop, drafter=True, num_pages=18)
        assert found.outputs == wanted.outputs
        # Up to the first shortage: a page taken early for a draft can save the later preemption.
        calm = list(takewhile(lambda counts: counts and counts[0] == 0, wanted.steps))
        assert found.steps[: len(calm)] == calm
        given_up += calm[-1][3]
        assert sum(found.depths) > 0.8 * plan.depth * len(found.depths)
    assert given_up > 10, "the pool must be full of reusable pages"


def test_prefix_hit_rate_equals_a_boot_without_a_drafter() -> None:
    texts, params = shared_prefix_load(1)
    hits = {}
    for name, plan, drafter in (("none", OFF, False), ("off", OFF, True), ("chain", chain(3), True)):
        with engine(plan, drafter=drafter, lanes=1) as built:  # one lane: the same order of admissions in all boots
            outputs = run(built, texts, params)
            hits[name] = (built.metrics().prefix_hit_tokens, outputs)
    assert hits["none"][0] > 0
    assert hits["off"] == hits["none"] and hits["chain"] == hits["none"]


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_abort_at_any_time_gives_everything_back(plan: Rule | str, loop: str) -> None:
    """Every third request asks for three choices with penalties and min_tokens."""
    source = random.Random(3)
    texts, params = (each[:12] for each in shared_prefix_load(3))
    params[::3] = [replace(each, n=3, min_tokens=5, **PENALTIES) for each in params[::3]]
    with engine(plan, num_pages=9, max_model_len=96, lanes=6, loop=loop) as built:
        for i, (text, each) in enumerate(zip(texts, params, strict=True)):
            built.add(Request(request_id=f"r{i}", prompt_token_ids=text, params=each))
        ended: list[tuple[str, int]] = []
        aborted: set[str] = set()
        while built.has_work():
            ended += [(d.request_id, d.choice_index) for d in built.step() if d.finish_reason is not None]
            victim = f"r{source.randrange(len(texts))}"
            if source.random() < 0.1 and victim not in aborted:
                aborted.add(victim)
                for delta in built.abort(victim):
                    assert delta.finish_reason == "abort"
                    ended.append((delta.request_id, delta.choice_index))
        built._prefix.pages.check()
        assert built._prefix.pages.num_held == 0
    assert sorted(ended) == sorted((f"r{i}", choice) for i, each in enumerate(params) for choice in range(each.n))


def test_logits_that_are_not_finite_fail_only_their_request() -> None:
    target, _ = models()
    with engine(chain(3)) as built:
        poisoned = target.embedding[250].clone()
        target.embedding[250] = float("nan")
        try:
            built.add(Request(request_id="bad", prompt_token_ids=(250, 9), params=SamplingParams(max_tokens=4)))
            built.add(Request(request_id="good", prompt_token_ids=(9, 10), params=SamplingParams(max_tokens=4)))
            reasons = {}
            while built.has_work():
                for delta in built.step():
                    if delta.finish_reason is not None:
                        reasons[delta.request_id] = (delta.finish_reason, delta.error)
        finally:
            target.embedding[250] = poisoned
    assert reasons["bad"][0] == "error" and "finite" in reasons["bad"][1]
    assert reasons["good"][0] in ("length", "stop")
