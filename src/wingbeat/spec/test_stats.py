"""Acceptance estimates on observations whose answer is known."""

from __future__ import annotations

import random

import pytest

from wingbeat.spec.plan import chain, tree
from wingbeat.spec.stats import MEMORY, PRIOR, AcceptStats, Observation


def test_conditional_acceptance_is_learned_depth_by_depth() -> None:
    """Depth d is tested only where d-1 was accepted: a draft that never had a chance is no evidence against it."""
    truth, source, seen = (0.8, 0.5, 0.9), random.Random(1), AcceptStats()
    for _ in range(4000):
        matched = 0
        while matched < 3 and source.random() < truth[matched]:
            matched += 1
        seen.observe([Observation(chain(3), 3, matched)])
    assert seen.conditional(3) == pytest.approx(truth, abs=0.06)


def test_nothing_seen_is_the_prior_and_deeper_leans_on_shallower() -> None:
    assert AcceptStats().conditional(3) == pytest.approx([PRIOR] * 3)
    seen = AcceptStats()
    seen.observe([Observation(chain(1), 1, 1)] * 1000)
    first, second = seen.conditional(2)
    assert first > 0.98 and second == pytest.approx(first)


def test_trees_and_chains_do_not_teach_one_another() -> None:
    seen, wide = AcceptStats(), tree(3, 2, 8)
    seen.observe([Observation(chain(3), 3, 0)] * 500 + [Observation(wide, 3, 3)] * 500)
    assert seen.expected_tokens(chain(3)) < 1.1
    assert seen.expected_tokens(wide) > 3.8
    assert seen.expected_tokens(tree(4, 2, 8)) == seen.expected_tokens(chain(4)), "an unseen tree is priced as a chain"


def test_probes_teach_the_first_depth_alone() -> None:
    seen, taught = AcceptStats(), AcceptStats()
    for each in (seen, taught):
        each.observe([Observation(chain(2), 2, 2)] * 50)
    taught.observe_probes([False] * 400)
    assert taught.conditional(1)[0] < 0.5 < seen.conditional(1)[0]
    assert taught._chain.trials[1] == seen._chain.trials[1]


def test_memory_is_bounded() -> None:
    seen = AcceptStats()
    seen.observe([Observation(chain(1), 1, 1)] * 10_000)
    assert seen.num_observed == pytest.approx(MEMORY, rel=0.01)
