"""CostTable: what a step costs, measured through the engine's own step at start-up and corrected while serving.

    step(B, rule, prefill rows, context) = verify(rows) + depth * draft_level(B * topk) + rest(rows) + context * slope

Each part is a measured curve over a few sizes, interpolated between them and extended by its last slope. Served
intervals (host work included) then correct it by a factor per batch size and depth.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from wingbeat.spec.plan import Rule

SMOOTHING = 0.1
"""Weight of the newest served interval in the correction."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over size, piecewise linear through measured points (sizes increasing)."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.seconds) >= 1
        assert all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))

    def __call__(self, size: float) -> float:
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.seconds[0]
        i = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[i - 1], self.sizes[i]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (high - low)
        return max(self.seconds[i - 1] + slope * (size - low), 0.0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Start-up measurements of one engine on one device."""

    verify: Curve
    """Target forward over rows, short context."""
    draft_level: Curve
    """One drafter level over its rows."""
    rest: Curve
    """Sampling, accept, commit and listening over rows."""
    context_slope: float
    """Extra seconds per token of context, all sequences summed."""

    def step(self, num_seqs: int, rule: Rule, *, prefill_rows: int = 0, total_context: int = 0) -> float:
        """Predicted seconds of one step."""
        rows = num_seqs * rule.nodes + prefill_rows
        drafting = 0.0
        if rule.depth:
            first = self.draft_level(num_seqs)
            drafting = first + (rule.depth - 1) * self.draft_level(num_seqs * rule.topk)
        return self.verify(rows) + drafting + self.rest(rows) + self.context_slope * total_context


@dataclass(slots=True)
class CostTable:
    """StepCosts and what serving has taught since."""

    costs: StepCosts
    _factors: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    _by_size: dict[int, float] = field(default_factory=dict[int, float])

    def predict(self, num_seqs: int, rule: Rule, *, prefill_rows: int = 0, total_context: int = 0) -> float:
        """Expected seconds from this step to the next."""
        raw = self.costs.step(num_seqs, rule, prefill_rows=prefill_rows, total_context=total_context)
        return raw * self._factors.get((_bucket(num_seqs), rule.depth), self._by_size.get(_bucket(num_seqs), 1.0))

    def observe(self, num_seqs: int, rule: Rule, interval: float, *, total_context: int) -> None:
        """One served interval without prefill rows, in seconds."""
        raw = self.costs.step(num_seqs, rule, total_context=total_context)
        factor = min(max(interval / raw, 0.3), 3.0)  # one stall must not decide
        size, key = _bucket(num_seqs), (_bucket(num_seqs), rule.depth)
        self._by_size[size] = _blend(self._by_size.get(size), factor)
        self._factors[key] = _blend(self._factors.get(key), factor)


def _bucket(num_seqs: int) -> int:
    return num_seqs.bit_length()


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
