"""wingbeat compare: run B against run A, refused where they are not comparable."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wingbeat.lab.compare import Comparison, check_reason, compare_runs
from wingbeat.lab.ledger import read_run
from wingbeat.lab.metrics import short_name

REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Throughput of run B over run A. Exit code 3 when refused, or when B is slower than --fail-below."""

    run_a: Annotated[Path, tyro.conf.Positional]
    """The earlier run, or the reference."""
    run_b: Annotated[Path, tyro.conf.Positional]
    factor: str
    """The dimension of the fingerprint under test; any other that differs confounds the comparison."""
    allow: tuple[str, ...] = ()
    """Dimensions that may differ all the same; needs --because."""
    because: str = ""
    """Why they may; printed with the result."""
    fail_below: float | None = None
    """Fail when an arm's overall ratio is surely (by its interval, where it has one) below this."""


def run(config: Compare) -> int:
    """Ratios to stdout, refusals to stderr."""
    check_reason(config.allow, config.because)
    found = compare_runs(read_run(config.run_a), read_run(config.run_b), config.factor, config.allow)
    if found.confounders:
        print("refused: confounded by:", file=sys.stderr)
        print("\n".join(f"  {difference}" for difference in found.confounders), file=sys.stderr)
        return REFUSED
    print("\n".join(_lines(found, config.because)))
    slow = [a.arm for a in found.arms if config.fail_below is not None and a.fails(config.fail_below)]
    for arm in slow:
        print(f"regression: {short_name(arm)} is below {config.fail_below}", file=sys.stderr)
    return REFUSED if slow else 0


def _lines(found: Comparison, because: str) -> list[str]:
    same = found.values[0] == found.values[1]
    lines = [f"factor {found.factor}: {found.values[0]} (A), {found.values[1]} (B){'; it does not differ' * same}"]
    lines += [f"allowed: {difference}, because {because}" for difference in found.allowed]
    lines += [f"note: differs in {difference}" for difference in found.flagged]
    if found.paired:
        lines.append("paired by prompts, not interleaved in time: intervals leave out a drift between the runs")
    else:
        lines.append("not paired: ratio without interval")
    for arm in found.arms:
        lines.append(f"{short_name(arm.arm)}: B / A = {_text(arm.overall)}")
        lines += [f"  {domain:<14} C={c:<4} {_text(ratio)}" for (domain, c), ratio in arm.cells.items()]
    return lines


def _text(ratio: object) -> str:
    return str(ratio).replace(" [?]", "")
