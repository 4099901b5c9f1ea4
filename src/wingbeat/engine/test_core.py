"""What the host decides and books around a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytest
from rig import engine, prompts

from wingbeat.engine import build
from wingbeat.engine.core import EngineCore
from wingbeat.engine.engine import Engine
from wingbeat.engine.pending import Pending
from wingbeat.engine.step import StepResult
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.types import ChoiceDelta, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def add(built: Engine, count: int, params: SamplingParams = GREEDY, longest: int = 30) -> None:
    for i, text in enumerate(prompts(count, seed=2, longest=longest)):
        built.add(Request(request_id=f"r{i}", prompt_token_ids=text, params=params))


def digested(built: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pending, StepResult]]:
    """Every step, as the engine reads it."""
    steps: list[tuple[Pending, StepResult]] = []
    digest = EngineCore.digest

    def noted(core: EngineCore, pending: Pending, result: StepResult) -> object:
        steps.append((pending, result))
        return digest(core, pending, result)

    monkeypatch.setattr(EngineCore, "digest", noted)
    return steps


@pytest.mark.parametrize("plan", [chain(7), tree(5, 4, 16)], ids=str)
def test_the_rule_shrinks_to_what_pages_grant(plan: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, costs and metrics see the depth that ran: the drafter never runs a level nobody has a page for."""
    monkeypatch.setattr(build, "SPARE_SLOTS", 0)
    with engine(plan, num_pages=9, max_model_len=96, lanes=6) as built:
        steps = digested(built, monkeypatch)
        add(built, 12)
        shown = []
        while built.has_work():
            before = len(steps)
            built.step()
            if len(steps) > before:
                state = built.speculation()
                shown.append((state.plan, state.depth, state.topk, state.rows))
        timeline = {point.plan for point in built.speculation().timeline}
    depths = {pending.rule.depth for pending, _ in steps if pending.decode}
    assert len(depths) > 2 and plan.depth in depths, "the pool must be small enough to press, and not always"
    for pending, result in steps:
        assert pending.step.rule == pending.rule
        assert pending.rule.depth == max(pending.step.depth_caps, default=0)
        if plan.topk == 1:  # a tree's rows may all go to shallower nodes
            assert pending.rule.depth == max(result.draft_depth)
    assert shown == [(str(p.rule), p.rule.depth, p.rule.topk, result.num_rows) for p, result in steps]
    assert timeline == {str(pending.rule) for pending, _ in steps}


def test_requests_that_cap_their_depth_shrink_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, max_draft_depth=2)
    with engine(chain(7)) as built:
        steps = digested(built, monkeypatch)
        add(built, 3, capped)
        while built.has_work():
            built.step()
    rules = {str(pending.rule) for pending, _ in steps}
    assert rules == {"off", "chain(1)", "chain(2)"}  # off: the prompts, and the last token of each


@pytest.mark.parametrize(
    ("rule", "depth", "expected"),
    [
        (chain(3), 5, chain(3)),
        (chain(3), 1, chain(1)),
        (chain(3), 0, OFF),
        (tree(5, 4, 16), 2, tree(2, 4, 16)),
        (tree(5, 4, 16), 1, tree(1, 4, 5)),
        (tree(5, 4, 16), -1, OFF),
    ],
)
def test_a_shallower_rule_is_a_rule(rule: Rule, depth: int, expected: Rule) -> None:
    assert rule.shallower(depth) == expected


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [chain(7), tree(5, 4, 16)], ids=str)
def test_counters_of_requests_and_engine_agree_where_answers_are_cut(
    plan: Rule, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted drafts are those delivered: ids and strings that end an answer inside a verified block cut them."""
    with engine() as plain:
        add(plain, 8)
        answers: dict[str, list[ChoiceDelta]] = {}
        while plain.has_work():
            for delta in plain.step():
                answers.setdefault(delta.request_id, []).append(delta)
    with engine(plan, loop=loop) as built:
        steps = digested(built, monkeypatch)
        for i, text in enumerate(prompts(8, seed=2, longest=30)):
            told = answers[f"r{i}"]
            ids = [token for delta in told for token in delta.token_ids]
            ends = {"stop": ("".join(d.text for d in told)[9:11],)} if i % 2 else {"stop_token_ids": (ids[11],)}
            params = replace(GREEDY, **ends)
            built.add(Request(request_id=f"r{i}", prompt_token_ids=text, params=params))
        delivered, stats = 0, []
        while built.has_work():
            for delta in built.step():
                delivered += len(delta.token_ids)
                stats += [delta.stats] if delta.stats is not None else []
        metrics = built.metrics()
    assert metrics.generation_tokens == delivered == sum(each.num_output_tokens for each in stats)
    accepted = sum(each.num_accepted_drafts for each in stats)
    assert metrics.num_accepted_tokens == accepted == sum(metrics.accepted_per_pos)
    assert delivered == accepted + sum(each.num_target_forwards for each in stats)
    assert metrics.num_drafts == sum(each.num_draft_steps for each in stats) == metrics.drafted_per_pos[0]
    assert metrics.num_draft_tokens == sum(each.num_draft_tokens for each in stats)
    for mine, theirs in (("accepted_per_pos", metrics.accepted_per_pos), ("drafted_per_pos", metrics.drafted_per_pos)):
        columns = zip_longest(*(getattr(each, mine) for each in stats), fillvalue=0)
        assert [sum(column) for column in columns] == theirs
    assert sum(sum(result.matched) for _, result in steps) > accepted, "an end must have cut accepted drafts"
