"""Everything that is concluded from a run: ratios, crossovers, the test of `auto`, and what limits them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat.errors import LabError
from wingbeat.lab.best_arm import BestArmTest, best_arm_test
from wingbeat.lab.crossover import Crossover, by_domain
from wingbeat.lab.ledger import Run
from wingbeat.lab.metrics import baseline, differing_outputs, is_auto, short_name, speeds
from wingbeat.lab.stats import Cell, Ratio, Speeds, overall_ratio, paired_log_ratios, pooled_intervals

AUTO_BOUND = 0.97
"""What a run must show of auto against the better fixed arm: the pooled ratio reaches this, and no cell's adjusted
interval lies wholly below it. A test on noisy figures - the policy itself aims at 0.99 of the best plan at every load,
which a run of this size could not tell from chance."""
FEW_BLOCKS = 4
SHORT_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmJudgement:
    """One arm against the baseline."""

    arm: str
    ratios: Mapping[Cell, Ratio]
    overall: Ratio
    crossovers: Mapping[str, Crossover]
    """By domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All conclusions of one run."""

    baseline: str | None
    arms: tuple[ArmJudgement, ...]
    """Every arm but the baseline."""
    auto: BestArmTest | None
    caveats: tuple[str, ...]


def judge_run(run: Run) -> Judgement:
    """The conclusions of a run; without a baseline there are figures but no ratios."""
    measured, base = speeds(run), baseline(run)
    others = [arm for arm in measured if arm != base]
    judged = tuple(j for arm in others if base in measured and (j := _judge_arm(arm, measured[arm], measured[base])))
    return Judgement(baseline=base, arms=judged, auto=_test_auto(measured), caveats=tuple(caveats(run)))


def _judge_arm(arm: str, own: Speeds, base: Speeds) -> ArmJudgement | None:
    samples = paired_log_ratios(own, base)
    if not samples:
        return None
    return ArmJudgement(
        arm=arm, ratios=pooled_intervals(samples), overall=overall_ratio(samples), crossovers=by_domain(samples)
    )


def _test_auto(measured: Mapping[str, Speeds]) -> BestArmTest | None:
    """Auto against the better fixed arm; None without both, or with too few blocks to choose and compare apart."""
    auto = next((arm for arm in measured if is_auto(arm)), None)
    rivals = tuple(arm for arm in measured if not is_auto(arm) and arm not in ("plain", "-"))
    if auto is None or not rivals:
        return None
    try:
        return best_arm_test(measured, auto, rivals, AUTO_BOUND)
    except LabError:
        return None


def caveats(run: Run) -> list[str]:
    """What a reader must know before believing the figures, most serious first."""
    return [*_unusable(run), *_outputs(run), *_short(run), *run.record.notes]


def _unusable(run: Run) -> list[str]:
    found = []
    if not run.complete:
        found.append(f"the run is {run.record.status}, not finished: cells may be missing")
    bad = [block for block in run.blocks if block.invalid]
    if bad:
        reason = f"{bad[0].domain} C={bad[0].concurrency} {short_name(bad[0].arm)}: {bad[0].invalid[0]}"
        found.append(f"{len(bad)} of {len(run.blocks)} blocks are invalid and were left out; first: {reason}")
    return found


def _outputs(run: Run) -> list[str]:
    """Texts that differ from the baseline's: legitimate near ties in low precision, or a fault."""
    base, found = baseline(run), []
    for arm in speeds(run):
        if base is None or arm == base:
            continue
        differ, compared = differing_outputs(run, arm, base)
        if differ:
            found.append(f"{differ} of {compared} texts of {short_name(arm)} differ from those of {short_name(base)}")
    return found


def _short(run: Run) -> list[str]:
    found = []
    if run.blocks and (blocks := len({block.block for block in run.blocks})) < FEW_BLOCKS:
        found.append(f"short run: {blocks} block{'s' * (blocks > 1)} per cell, so intervals are wide or missing")
    windows = [block.window_s[1] - block.window_s[0] for block in run.blocks if not block.invalid]
    if windows and min(windows) < SHORT_WINDOW_S:
        found.append(f"short windows: the shortest steady window lasted {min(windows):.1f} s")
    return found
