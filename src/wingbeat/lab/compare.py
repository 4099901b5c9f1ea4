"""Two runs against each other, refused where something else than the factor under test differs. Pure.

Runs are paired when their blocks hold the same prompts with the same seeds. They were still made one after the other:
the interval covers the noise of blocks, not a drift of the machine between the runs; arms of one run are the better
comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wingbeat.errors import ConfigError, LabError, unknown_name
from wingbeat.lab.fingerprint import HARD, SOFT
from wingbeat.lab.ledger import Run
from wingbeat.lab.metrics import speeds
from wingbeat.lab.record import UNKNOWN, Fingerprint
from wingbeat.lab.stats import Cell, Ratio, Speeds, overall_ratio, paired_log_ratios, pooled_intervals

SAME_PROMPTS = ("suites", "concurrency", "seed", "block_load", "max_tokens", "sampling")
"""Dimensions that must agree for block b of one run to hold the prompts of block b of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One dimension in which two fingerprints do not agree."""

    dimension: str
    a: str
    b: str

    def __str__(self) -> str:
        if UNKNOWN in (self.a, self.b):
            side = "both runs" if self.a == self.b else "A" if self.a == UNKNOWN else "B"
            return f"{self.dimension} (unknown in {side}: unknown equals nothing)"
        return f"{self.dimension} ({self.a} against {self.b})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """B over A for one arm that both runs have."""

    arm: str
    overall: Ratio
    cells: Mapping[Cell, Ratio]

    def fails(self, bound: float) -> bool:
        """Below the bound: surely, where there is an interval; else by its value."""
        return (self.overall.value if self.overall.high is None else self.overall.high) < bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What may be said about two runs."""

    factor: str
    values: tuple[str, str]
    confounders: tuple[Difference, ...]
    """Not empty: refused, and `arms` is empty."""
    allowed: tuple[Difference, ...]
    flagged: tuple[Difference, ...]
    paired: bool
    arms: tuple[ArmComparison, ...]


def compare_runs(a: Run, b: Run, factor: str, allow: tuple[str, ...] = ()) -> Comparison:
    """B against A. Raises ConfigError for an unknown dimension, LabError when no cell is shared."""
    for name in (factor, *allow):
        if name not in HARD + SOFT:
            raise unknown_name("dimension", name, HARD + SOFT)
    fingers = a.record.fingerprint, b.record.fingerprint
    hard = [d for d in differences(*fingers, HARD) if d.dimension != factor]
    confounders = tuple(d for d in hard if d.dimension not in allow)
    paired = not differences(*fingers, SAME_PROMPTS)
    return Comparison(
        factor=factor,
        values=(fingers[0].get(factor), fingers[1].get(factor)),
        confounders=confounders,
        allowed=tuple(d for d in hard if d.dimension in allow),
        flagged=tuple(d for d in differences(*fingers, SOFT) if d.dimension != factor),
        paired=paired,
        arms=() if confounders else _compare_arms(speeds(a), speeds(b), paired),
    )


def differences(a: Fingerprint, b: Fingerprint, names: tuple[str, ...]) -> list[Difference]:
    """Dimensions that do not agree; unknown agrees with nothing, not even with unknown."""
    pairs = [Difference(dimension=name, a=a.get(name), b=b.get(name)) for name in names]
    return [pair for pair in pairs if pair.a != pair.b or UNKNOWN in (pair.a, pair.b)]


def _compare_arms(a: Mapping[str, Speeds], b: Mapping[str, Speeds], paired: bool) -> tuple[ArmComparison, ...]:
    shared = [arm for arm in a if arm in b and a[arm].keys() & b[arm].keys()]
    if not shared:
        raise LabError(f"the runs share no arm with a common cell: A has {', '.join(a)}; B has {', '.join(b)}")
    return tuple((_paired if paired else _unpaired)(arm, a[arm], b[arm]) for arm in shared)


def _paired(arm: str, a: Speeds, b: Speeds) -> ArmComparison:
    samples = paired_log_ratios(b, a)
    return ArmComparison(arm=arm, overall=overall_ratio(samples), cells=pooled_intervals(samples))


def _unpaired(arm: str, a: Speeds, b: Speeds) -> ArmComparison:
    """Ratios of geometric means; without pairs nothing is known of their spread."""
    logs = {c: float(np.mean(np.log([*b[c].values()])) - np.mean(np.log([*a[c].values()]))) for c in b if c in a}
    cells = {c: Ratio(float(np.exp(x)), None, None, len(b[c])) for c, x in logs.items()}
    overall = Ratio(float(np.exp(np.mean([*logs.values()]))), None, None, sum(len(b[c]) for c in logs))
    return ArmComparison(arm=arm, overall=overall, cells=cells)


def check_reason(allow: tuple[str, ...], because: str) -> None:
    """Raises ConfigError when a difference is allowed without saying why."""
    if allow and not because.strip():
        raise ConfigError("because", because, f"the reason why {', '.join(allow)} may differ")
