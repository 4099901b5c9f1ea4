"""Where speculation stops paying: the concurrency at which the throughput ratio falls through 1. Pure.

More load can only make speculation less worth while, so the log ratio over log2(concurrency) is fitted as non-
increasing (isotonic regression); the crossover is its zero, by interpolation, and its interval is where the pointwise
t band crosses zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy.optimize import isotonic_regression

from wingbeat.lab.stats import LEVEL, Cell, Floats, Spread, pooled_spread

INDISTINGUISHABLE = 0.02
"""Ratios within 1 +- this are not told apart."""


class Answer(Enum):
    """The legal answers to 'up to which concurrency does it pay?'."""

    NUMBER = "number"
    BEYOND = "beyond the largest concurrency measured"
    NEVER = "never pays"
    SAME = "indistinguishable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Up to where an arm pays in one domain.

    `low` None: the interval reaches below the smallest concurrency measured; `high` None: beyond the largest.
    """

    answer: Answer
    value: float | None
    low: float | None
    high: float | None
    has_interval: bool
    smallest: int
    largest: int

    def __str__(self) -> str:
        if self.answer is Answer.SAME:
            return "indistinguishable"
        if self.answer is Answer.NEVER:
            most = self._bound(self.high, f">{self.largest}")
            return "never pays" + (f" (at most up to C = {most})" if self._open_above else "")
        if self.answer is Answer.BEYOND:
            surely = self._bound(self.low, f"<{self.smallest}")
            return f"beyond C = {self.largest}" + (f" (surely up to {surely})" if self._open_below else "")
        if not self.has_interval:
            return f"C = {self.value:.3g} [?]"
        low, high = self._bound(self.low, f"<{self.smallest}"), self._bound(self.high, f">{self.largest}")
        return f"C = {self.value:.3g} [{low}, {high}]"

    @property
    def _open_above(self) -> bool:
        """The band still pays somewhere although the fit does not."""
        return self.has_interval and (self.high is None or self.high > self.smallest)

    @property
    def _open_below(self) -> bool:
        return self.has_interval and (self.low is None or self.low < self.largest)

    @staticmethod
    def _bound(value: float | None, outside: str) -> str:
        return outside if value is None else f"{value:.3g}"


def crossover(samples: Mapping[int, Floats], spread: Spread | None = None, level: float = LEVEL) -> Crossover:
    """The crossover of one domain from its log ratios by concurrency; `spread` may be pooled over more domains."""
    points = sorted(samples)
    x = np.log2(np.asarray(points, dtype=np.float64))
    means = np.array([samples[c].mean() for c in points])
    counts = np.array([len(samples[c]) for c in points], dtype=np.float64)
    widths = [(spread or pooled_spread(samples)).half_width(n**-0.5, level) for n in counts]
    fit = _falling(means, counts)
    known = all(w is not None for w in widths)
    half = np.array([w or 0.0 for w in widths])
    lower, upper = _falling(means - half, counts), _falling(means + half, counts)
    edge = np.log1p(INDISTINGUISHABLE)
    if known and bool((np.abs([lower, upper]) <= edge).all()):
        return _answer(Answer.SAME, points, None, None, None, True)
    value = _zero(x, fit)
    answer = Answer.NEVER if value == -np.inf else Answer.BEYOND if value == np.inf else Answer.NUMBER
    return _answer(answer, points, value, _zero(x, lower), _zero(x, upper), known)


def _answer(
    answer: Answer, points: list[int], value: float | None, low: float | None, high: float | None, known: bool
) -> Crossover:
    largest, smallest = points[-1], points[0]
    if answer is Answer.NEVER and high == -np.inf:
        high = smallest
    if answer is Answer.BEYOND and low == np.inf:
        low = largest
    return Crossover(
        answer=answer,
        value=_finite(value) if answer is Answer.NUMBER else None,
        low=_finite(low) if known else None,
        high=_finite(high) if known else None,
        has_interval=known,
        smallest=smallest,
        largest=largest,
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


def _falling(y: Floats, weights: Floats) -> Floats:
    """The closest non-increasing sequence."""
    return np.asarray(isotonic_regression(y, weights=weights, increasing=False).x, dtype=np.float64)


def _zero(x: Floats, y: Floats) -> float:
    """Concurrency at which a non-increasing curve falls to zero; -inf when never above, inf when always above."""
    above = int((y > 0).sum())
    if above == 0:
        return -np.inf
    if above == len(y):
        return np.inf
    share = y[above - 1] / (y[above - 1] - y[above])
    return float(2.0 ** (x[above - 1] + share * (x[above] - x[above - 1])))


def by_domain(samples: Mapping[Cell, Floats], level: float = LEVEL) -> dict[str, Crossover]:
    """The crossover of every domain, the spread pooled over all of them."""
    spread = pooled_spread(samples)
    domains = dict.fromkeys(domain for domain, _ in samples)
    return {d: crossover({c: x for (name, c), x in samples.items() if name == d}, spread, level) for d in domains}
