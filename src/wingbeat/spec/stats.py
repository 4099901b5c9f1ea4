"""AcceptStats: running estimates of how likely a draft is accepted, by depth.

Conditional acceptance: the chance that the draft at depth d is accepted given that depth d-1 was. Observations fade, so
that the estimate follows the traffic; a depth seen rarely leans on the depth before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.spec.plan import MAX_DEPTH, Rule

PRIOR = 0.6
"""Acceptance assumed at depth 1 before anything was seen."""
PRIOR_WEIGHT = 4.0
MEMORY = 400.0
"""Observations (sequences times steps) an estimate remembers: about 40 steps of 10 sequences."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One verified step of one sequence; `depth` drafts in a line were offered under `rule`, `matched` accepted."""

    rule: Rule
    depth: int
    matched: int


class AcceptStats:
    """Fading counts per depth for chains, and per tree rule. The policy reads, the engine writes."""

    def __init__(self) -> None:
        self._chain = _Counts()
        self._trees: dict[Rule, _Counts] = {}

    def observe(self, observations: list[Observation]) -> None:
        """Books verified steps under the rule they were made with; chains of any depth inform one another."""
        for seen in observations:
            counts = self._chain if seen.rule.topk == 1 else self._trees.setdefault(seen.rule, _Counts())
            counts.add(seen.depth, seen.matched)

    def observe_probes(self, hits: list[bool]) -> None:
        """First-position guesses compared with what the target sampled, no row verified."""
        for hit in hits:
            self._chain.add(1, int(hit))

    def conditional(self, depth: int) -> list[float]:
        """Chain acceptance at depth 1..depth, each given that the one before was accepted."""
        return self._chain.conditional(depth)

    def expected_tokens(self, rule: Rule) -> float:
        """Committed tokens per sequence and step under `rule`, bonus included (off: 1)."""
        counts = self._chain if rule.topk == 1 else self._trees.get(rule, self._chain)
        total, reach = 1.0, 1.0
        for alpha in counts.conditional(rule.depth):
            reach *= alpha
            total += reach
        return total

    @property
    def num_observed(self) -> float:
        """Depth-1 observations still remembered."""
        return self._chain.trials[0]


class _Counts:
    def __init__(self) -> None:
        self.trials = [0.0] * MAX_DEPTH
        self.hits = [0.0] * MAX_DEPTH

    def add(self, depth: int, matched: int) -> None:
        for d in range(min(depth, matched + 1)):
            fade = 1.0 - 1.0 / MEMORY
            self.trials[d] = self.trials[d] * fade + 1.0
            self.hits[d] = self.hits[d] * fade + (1.0 if d < matched else 0.0)

    def conditional(self, depth: int) -> list[float]:
        alphas: list[float] = []
        lean = PRIOR
        for d in range(depth):
            lean = (self.hits[d] + PRIOR_WEIGHT * lean) / (self.trials[d] + PRIOR_WEIGHT)
            alphas.append(lean)
        return alphas
