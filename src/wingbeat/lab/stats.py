"""Statistics of paired, interleaved blocks. Pure.

Everything is done on logarithms of throughput ratios, cell by cell (a cell is one domain at one concurrency). Blocks
are few, so the spread of a block is estimated from all cells together (pooled SD, Student's t); what cells share is
their noise, not their mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from wingbeat.errors import LabError

LEVEL = 0.95
Cell = tuple[str, int]
"""(domain, concurrency)."""
Speeds = Mapping[Cell, Mapping[int, float]]
"""Tokens per second of one arm: cell -> block number -> value."""
Floats = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A throughput ratio with its interval; bounds are None when the blocks were too few to tell the spread."""

    value: float
    low: float | None
    high: float | None
    num_blocks: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f} [?]"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Spread:
    """The pooled standard deviation of one block's log ratio, and how well it is known."""

    sd: float
    degrees: int

    def half_width(self, standard_error: float, level: float) -> float | None:
        """Half the width of an interval, given its standard error in units of `sd`; None without degrees of freedom."""
        if self.degrees < 1:
            return None
        return float(student.ppf((1 + level) / 2, self.degrees)) * self.sd * standard_error

    def p_below(self, log_mean: float, standard_error: float, log_bound: float) -> float:
        """One-sided p for 'the true log ratio is below the bound'; 1.0 when the spread is unknown."""
        if self.degrees < 1:
            return 1.0
        if self.sd == 0.0:
            return float(log_mean >= log_bound)
        return float(student.cdf((log_mean - log_bound) / (self.sd * standard_error), self.degrees))


def paired_log_ratios(arm: Speeds, base: Speeds) -> dict[Cell, Floats]:
    """log(arm / base) of every block that both arms have, in block order; cells without a shared block are left out."""
    ratios: dict[Cell, Floats] = {}
    for cell in arm:
        other = base.get(cell, {})
        shared = sorted(b for b, speed in arm[cell].items() if speed > 0 and other.get(b, 0.0) > 0)
        if shared:
            ratios[cell] = np.log([arm[cell][b] / other[b] for b in shared])
    return ratios


def pooled_spread(samples: Mapping[K, Floats]) -> Spread:
    """SD around each group's own mean, pooled over the groups."""
    degrees = sum(len(x) - 1 for x in samples.values())
    squares = sum(float(((x - x.mean()) ** 2).sum()) for x in samples.values())
    return Spread(sd=float(np.sqrt(squares / degrees)) if degrees else 0.0, degrees=degrees)


def pooled_intervals(samples: Mapping[K, Floats], level: float = LEVEL) -> dict[K, Ratio]:
    """Geometric mean ratio of each group, with a t interval on the pooled SD."""
    spread = pooled_spread(samples)
    return {key: ratio_of(float(x.mean()), len(x) ** -0.5, spread, level, len(x)) for key, x in samples.items()}


def overall_ratio(samples: Mapping[K, Floats], spread: Spread | None = None, level: float = LEVEL) -> Ratio:
    """Geometric mean over groups, each group weighing the same. Raises LabError when there is none."""
    if not samples:
        raise LabError("no block was measured for both arms: nothing to compare")
    error = float(np.sqrt(sum(1 / len(x) for x in samples.values()))) / len(samples)
    mean = float(np.mean([x.mean() for x in samples.values()]))
    return ratio_of(mean, error, spread or pooled_spread(samples), level, sum(map(len, samples.values())))


def ratio_of(log_mean: float, standard_error: float, spread: Spread, level: float, count: int) -> Ratio:
    """The ratio whose log mean has this standard error (in units of the spread)."""
    half = spread.half_width(standard_error, level)
    if half is None:
        return Ratio(float(np.exp(log_mean)), None, None, count)
    return Ratio(float(np.exp(log_mean)), float(np.exp(log_mean - half)), float(np.exp(log_mean + half)), count)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted = [1.0] * len(order)
    worst = 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min((len(order) - rank) * p_values[i], 1.0))
        adjusted[i] = worst
    return adjusted


def holm_levels(p_values: Sequence[float], alpha: float = 1 - LEVEL) -> list[float]:
    """Level at which each interval agrees with Holm's test; the step where the descent stops holds for the rest."""
    order = np.argsort(p_values, kind="stable")
    levels = [1.0] * len(order)
    stopped: float | None = None
    for rank, i in enumerate(order):
        share = alpha / (len(order) - rank)
        if stopped is None and p_values[i] > share:
            stopped = share
        levels[i] = 1 - (share if stopped is None else stopped)
    return levels
