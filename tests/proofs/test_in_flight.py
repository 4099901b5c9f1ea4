"""Proof 2 where it depends on drafts in flight: penalties and min_tokens count a row's ancestors as if committed.

With 256 tokens a draft is hardly ever wanted again while it is still in flight, and a sampler that forgot it would go
unseen. With 8 tokens it is wanted all the time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import EOS, PLANS, engine, prompts, run

from wingbeat.spec.plan import OFF, Rule
from wingbeat.types import SamplingParams

FEW = 8
LONG = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PENALISED = [
    replace(LONG, frequency_penalty=2.0),
    replace(LONG, presence_penalty=2.0),
    replace(LONG, repetition_penalty=1.5),
    replace(LONG, temperature=0.6, seed=1, frequency_penalty=0.5, presence_penalty=0.8),
    replace(LONG, temperature=0.7, seed=2, repetition_penalty=1.3, top_p=0.9),
    replace(LONG, temperature=1.0, seed=3, frequency_penalty=2.0, presence_penalty=-1.0, repetition_penalty=1.2, n=3),
    replace(LONG, temperature=0.9, seed=4, presence_penalty=1.5, ignore_eos=False, min_tokens=12, n=3),
]
TEXTS = prompts(len(PENALISED), seed=2, longest=6, first=0, vocab=FEW)
SHORTEST = range(3, 11)


@pytest.fixture(scope="module")
def plain_penalised():
    with engine(drafter=False, vocab=FEW) as built:
        return run(built, TEXTS, PENALISED)


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_penalties_count_drafts_in_flight(plan: Rule | str, loop: str, plain_penalised) -> None:
    with engine(plan, loop=loop, vocab=FEW) as built:
        assert run(built, TEXTS, PENALISED) == plain_penalised
        assert (built.metrics().num_accepted_tokens > 40) == (plan != OFF)


@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_min_tokens_counts_drafts_in_flight(plan: Rule | str) -> None:
    """EOS is wanted everywhere and barred up to min_tokens: answers end right there, wherever in a block that is."""
    params = [
        replace(LONG, ignore_eos=False, min_tokens=shortest, logit_bias={EOS: 100.0}, temperature=heat, seed=shortest)
        for shortest in SHORTEST
        for heat in (0.0, 0.8)
    ]
    with engine(plan) as built:
        outputs = run(built, prompts(len(params), seed=3), params)
        accepted = built.metrics().num_accepted_tokens
    assert [len(outputs[f"r{i}", 0]) for i in range(len(params))] == [each.min_tokens + 1 for each in params]
    assert all(tokens[-1] == EOS for tokens in outputs.values())
    assert (accepted > 20) == (plan != OFF)
