"""Formulas of `measures` on counts whose true rates are known."""

from __future__ import annotations

import pytest

from wingbeat.lab.measures import PositionRate, acceptance_by_position
from wingbeat.lab.record import SpeculationUse


def use(accepted: tuple[int, ...], drafted: tuple[int, ...], num_draft_steps: int) -> SpeculationUse:
    return SpeculationUse(
        num_tokens=1000,
        num_target_forwards=500,
        num_draft_steps=num_draft_steps,
        num_draft_tokens=sum(drafted),
        num_accepted_drafts=sum(accepted),
        accepted_per_pos=accepted,
        drafted_per_pos=drafted,
    )


def test_shallow_drafts_do_not_count_against_deeper_positions() -> None:
    """100 steps of depth 1 and 100 of depth 2; four fifths are accepted wherever they are tested."""
    rates = acceptance_by_position(use((160, 64), (200, 100), 200))
    assert [rate.conditional for rate in rates] == pytest.approx([0.8, 0.8])
    assert [rate.unconditional for rate in rates] == pytest.approx([0.8, 0.64])
    assert [rate.num_tested for rate in rates] == pytest.approx([200, 80])


def test_a_server_without_drafts_per_position_drafts_equally_deep() -> None:
    assert acceptance_by_position(use((10, 4), (), 20)) == (PositionRate(0.5, 0.5, 20), PositionRate(0.4, 0.2, 10))


def test_nothing_accepted_leaves_nothing_to_test() -> None:
    assert acceptance_by_position(use((0, 0), (5, 5), 5)) == (PositionRate(0, 0, 5), PositionRate(0, 0, 0))
    assert acceptance_by_position(use((), (), 0)) == ()
