"""Is `auto` as good as the better of the fixed arms? Pure.

The largest of several noisy figures is too large on average, so comparing with 'the best arm' on the blocks that
chose it is unfair to auto. The blocks are halved: the better arm is chosen on one half and compared on the other,
then the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wingbeat.errors import LabError
from wingbeat.lab.stats import (
    LEVEL,
    Cell,
    Floats,
    Ratio,
    Speeds,
    Spread,
    holm,
    holm_levels,
    overall_ratio,
    paired_log_ratios,
    pooled_spread,
    ratio_of,
)

FOLDS = 1.09
"""Widens the spread: where arms are equal, each half chooses by the noise that the other compares with, so the halves
are correlated. With k equal rivals the variance of their mean grows by the share m^2 / (2 (k - 1)), m the mean of the
largest of k standard normals: at most 18 %, so its root by 9 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellVerdict:
    """One cell of the comparison."""

    ratio: Ratio
    """Interval adjusted for the number of cells (Holm)."""
    p_below: float
    """Adjusted one-sided p of 'the true ratio is below the bound'."""
    rivals: tuple[str, ...]
    """The arms that were chosen as the better one, by half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestArmTest:
    """The candidate against the better fixed arm of each cell."""

    candidate: str
    rivals: tuple[str, ...]
    bound: float
    pooled: Ratio
    cells: Mapping[Cell, CellVerdict]

    @property
    def failed_cells(self) -> tuple[Cell, ...]:
        """Cells whose adjusted interval lies wholly below the bound."""
        return tuple(c for c, v in self.cells.items() if v.ratio.high is not None and v.ratio.high < self.bound)

    @property
    def held(self) -> bool:
        """The pooled ratio reaches the bound, and no cell is surely below it."""
        return self.pooled.value >= self.bound and not self.failed_cells

    @property
    def lowest(self) -> float:
        return min(v.ratio.value for v in self.cells.values())


def half_of(block: int) -> int:
    """0 or 1, as 0 1 1 0: arms run forth and back in turn, so each half has both orders, and a drift cancels."""
    return (block + 1) // 2 % 2


def best_arm_test(speeds: Mapping[str, Speeds], candidate: str, rivals: tuple[str, ...], bound: float) -> BestArmTest:
    """Cross-fitted comparison of `candidate` with the better of `rivals`. Raises LabError below two blocks per cell."""
    chosen: dict[Cell, tuple[str, ...]] = {}
    samples: dict[Cell, Floats] = {}
    for cell in speeds[candidate]:
        parts = _cross_fit({arm: speeds[arm].get(cell, {}) for arm in rivals}, speeds[candidate][cell])
        if parts:
            chosen[cell] = tuple(arm for arm, _ in parts)
            samples[cell] = np.concatenate([x for _, x in parts])
    if not samples:
        names = ", ".join(rivals)
        raise LabError(f"{candidate} cannot be compared with the better of {names}: two blocks per cell are needed")
    spread = _spread(speeds, candidate, rivals)
    pooled = overall_ratio(samples, spread)
    cells = _judge(samples, chosen, spread, bound)
    return BestArmTest(candidate=candidate, rivals=rivals, bound=bound, pooled=pooled, cells=cells)


def _spread(speeds: Mapping[str, Speeds], candidate: str, rivals: tuple[str, ...]) -> Spread:
    """The spread of candidate over one rival, taken over all rivals, chosen or not: choosing would trim it."""
    ratios = [paired_log_ratios(speeds[candidate], speeds[rival]) for rival in rivals]
    spread = pooled_spread({(i, cell): x for i, cells in enumerate(ratios) for cell, x in cells.items()})
    # The rivals share the candidate's noise: all of them together know little more than one of them.
    degrees = max(sum(len(x) - 1 for x in cells.values()) for cells in ratios)
    return Spread(sd=spread.sd * FOLDS, degrees=min(spread.degrees, degrees))


def _cross_fit(rivals: Mapping[str, Mapping[int, float]], own: Mapping[int, float]) -> list[tuple[str, Floats]]:
    """(arm chosen on the other half, log ratios on this half) for both halves; empty when a half is missing."""
    shared = sorted(b for b in own if own[b] > 0 and all(r.get(b, 0.0) > 0 for r in rivals.values()))
    halves = [[b for b in shared if half_of(b) == h] for h in (0, 1)]
    if not halves[0] or not halves[1]:
        return []
    parts = []
    for here, there in (halves, halves[::-1]):
        best = max(rivals, key=lambda arm: float(np.mean(np.log([rivals[arm][b] for b in there]))))
        parts.append((best, np.log([own[b] / rivals[best][b] for b in here])))
    return parts


def _judge(
    samples: Mapping[Cell, Floats], chosen: Mapping[Cell, tuple[str, ...]], spread: Spread, bound: float
) -> dict[Cell, CellVerdict]:
    errors = [len(x) ** -0.5 for x in samples.values()]
    means = [float(x.mean()) for x in samples.values()]
    raw = [spread.p_below(m, e, float(np.log(bound))) for m, e in zip(means, errors, strict=True)]
    # The interval is two-sided, the question one-sided: the upper end stands at the level of the test.
    levels = [2 * level - 1 for level in holm_levels(raw, 1 - LEVEL)]
    return {
        cell: CellVerdict(ratio=ratio_of(m, e, spread, level, len(x)), p_below=p, rivals=chosen[cell])
        for (cell, x), m, e, level, p in zip(samples.items(), means, errors, levels, holm(raw), strict=True)
    }
