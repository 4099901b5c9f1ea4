"""The verdict of a run in words: where speculation pays, what it costs beyond, and whether auto keeps its promise."""

from __future__ import annotations

from wingbeat.lab.best_arm import BestArmTest
from wingbeat.lab.crossover import Answer
from wingbeat.lab.judge import ArmJudgement, Judgement, judge_run
from wingbeat.lab.ledger import Run
from wingbeat.lab.metrics import is_auto, short_name
from wingbeat.lab.stats import Ratio

REPETITION = "Small greedy models repeat themselves, which flatters acceptance."


def verdict_lines(run: Run) -> list[str]:
    """The verdict, one sentence a line; caveats come last and begin with 'caveat: '."""
    judgement = judge_run(run)
    return [*conclusions(judgement), *(f"caveat: {text}" for text in judgement.caveats)]


def conclusions(judgement: Judgement) -> list[str]:
    """The sentences that answer the question, without the caveats."""
    if judgement.baseline is None:
        return ["no arm ran without speculation: throughput is shown, but whether speculation pays cannot be said"]
    lines = [line for arm in judgement.arms for line in _lines_of(arm, judgement.baseline)]
    if judgement.auto is not None:
        lines.append(auto_line(judgement.auto))
    return lines or [f"only {short_name(judgement.baseline)} was measured: there is nothing to compare it with"]


def _lines_of(arm: ArmJudgement, base: str) -> list[str]:
    if arm.arm in ("plain", "-"):
        return [f"{short_name(base)} against {arm.arm}: {_inverse(arm.overall)}"]
    if is_auto(arm.arm):
        return [f"auto against {short_name(base)}: {arm.overall} over all cells"]
    return [f"{domain}: {crossover_line(arm, domain, base)}" for domain in arm.crossovers]


def _inverse(ratio: Ratio) -> Ratio:
    low = None if ratio.high is None else 1 / ratio.high
    high = None if ratio.low is None else 1 / ratio.low
    return Ratio(1 / ratio.value, low, high, ratio.num_blocks)


def crossover_line(arm: ArmJudgement, domain: str, base: str) -> str:
    """How far an arm pays in one domain, what it gains before and what it costs beyond."""
    name, found = f"speculation ({short_name(arm.arm)})", arm.crossovers[domain]
    values = [r.value for (d, _), r in arm.ratios.items() if d == domain]
    gain, loss = round(100 * (max(values) - 1)), round(100 * (1 - min(values)))
    if found.answer is Answer.SAME:
        return f"{name} and {short_name(base)} are indistinguishable (within 2 % at every concurrency)"
    if found.answer is Answer.NEVER:
        return f"{name} {found}; it costs up to {max(loss, 0)} %"
    if found.answer is Answer.BEYOND:
        return f"{name} pays at every concurrency measured, {found}; gains up to {max(gain, 0)} %"
    return f"{name} pays up to {found}, gaining up to {max(gain, 0)} %; beyond it costs up to {max(loss, 0)} %"


def auto_line(test: BestArmTest) -> str:
    """Whether auto is as good as the better fixed arm, cell by cell."""
    *first, last = map(short_name, test.rivals)
    names = f"{', '.join(first)} and {last}" if first else last
    start = f"auto against the better of {names}: {test.pooled}, lowest cell {test.lowest:.2f}"
    if test.failed_cells:
        cells = ", ".join(f"{domain} C={c}" for domain, c in test.failed_cells)
        return f"{start}; surely below {test.bound:.2f} in {cells}"
    if not test.held:
        return f"{start}; no cell is surely below {test.bound:.2f}, but all of them together are below it"
    if test.pooled.low is None:
        return f"{start}; too few blocks for an interval"
    return f"{start}; no cell is surely below {test.bound:.2f}"
