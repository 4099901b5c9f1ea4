"""What the report says, as plain records: the page, the Markdown and the JSON show the same content."""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.lab.best_arm import BestArmTest
from wingbeat.lab.fingerprint import HARD
from wingbeat.lab.judge import Judgement, judge_run
from wingbeat.lab.ledger import Run
from wingbeat.lab.metrics import CellFigures, Latency, arms, cell_figures, domains, short_name
from wingbeat.lab.stats import Ratio
from wingbeat.lab.verdict import REPETITION, conclusions

NONE = "\u2013"
"""Stands where a figure may not be stated."""

METHOD = (
    "Closed loop: each of C slots sends its next request when its last one ended. A cell is one domain at one C.",
    "Blocks: every block runs all arms of a cell in turn, in turned order from block to block, on the same prompts.",
    "Tokens are counted by the server's usage, never by stream chunks, in the steady window where every slot is busy.",
    "Ratios are geometric means of paired blocks; intervals are 95 %, Student's t, the spread pooled over all cells.",
    "Crossover: the log ratio over log2 C, fitted as non-increasing; its zero, and the zeros of its band.",
    "Auto: the better arm is chosen on one half of the blocks and compared on the other, both ways (Holm over cells).",
)
FORMULAS = (
    ("output tok/s", "tokens that arrived in the steady window / its seconds"),
    ("TTFT", "first chunk with text \u2212 send"),
    ("TPOT", "(last chunk \u2212 first chunk) / (tokens \u2212 1)"),
    ("E2E", "last chunk with text \u2212 send"),
    ("accept_len", "\u03a3 tokens / \u03a3 target forwards of sequences; plain decoding is 1"),
    ("conditional acceptance", "u(i) / u(i \u2212 1), where u(i) = accepted at position i / drafted at position i"),
    ("percentiles", "nearest rank; p90 needs 64 requests, p99 needs 662, else not stated"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text; the first `labels` columns name the row, the rest are figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything the report says in words and tables."""

    title: str
    subtitle: str
    verdict: tuple[str, ...]
    caveats: tuple[str, ...]
    ratios: Table
    auto: Table | None
    latency: Table
    fingerprint: Table
    method: tuple[str, ...] = METHOD
    formulas: tuple[tuple[str, str], ...] = FORMULAS
    repetition: str = REPETITION


def content_of(run: Run, judgement: Judgement | None = None) -> Content:
    judgement = judgement or judge_run(run)
    plan, cells = run.record.plan, cell_figures(run)
    blocks = len({block.block for block in run.blocks})
    return Content(
        title="Does speculation pay here?",
        subtitle=f"{plan.model} \u00b7 {run.record.started_at} \u00b7 {', '.join(map(short_name, arms(run)))} \u00b7 "
        f"{blocks} interleaved block{'' if blocks == 1 else 's'} \u00b7 run {run.record.run_id}",
        verdict=tuple(conclusions(judgement)),
        caveats=judgement.caveats,
        ratios=_ratio_table(run, judgement, cells),
        auto=None if judgement.auto is None else _auto_table(judgement.auto),
        latency=_latency_table(cells),
        fingerprint=_fingerprint_table(run),
    )


def _ratio_table(run: Run, judgement: Judgement, cells: tuple[CellFigures, ...]) -> Table:
    """One row per cell: the baseline's tokens per second, then each arm's with its ratio."""
    found = {(c.arm, c.domain, c.concurrency): c for c in cells}
    names = [arm for arm in arms(run) if any(c.arm == arm for c in cells)]
    ratios = {arm.arm: arm.ratios for arm in judgement.arms}
    rows = []
    for domain in domains(run):
        for c in sorted({cell.concurrency for cell in cells if cell.domain == domain}):
            speeds = [_speed(found.get((arm, domain, c))) for arm in names]
            versus = [_interval(ratios[arm].get((domain, c))) for arm in names if arm in ratios]
            rows.append((domain, str(c), *speeds, *versus))
    base = short_name(judgement.baseline or "")
    versus_names = [f"{short_name(arm)} / {base}" for arm in names if arm in ratios]
    head = ("domain", "C", *(f"{short_name(arm)}, tok/s" for arm in names), *versus_names)
    return Table(head=head, rows=tuple(rows), labels=2)


def _speed(cell: CellFigures | None) -> str:
    return (
        NONE if cell is None else f"{cell.tokens_per_s:.1f}" if cell.tokens_per_s < 100 else f"{cell.tokens_per_s:.0f}"
    )


def _interval(ratio: Ratio | None) -> str:
    return NONE if ratio is None else str(ratio)


def _auto_table(test: BestArmTest) -> Table:
    rows = tuple(
        (domain, str(c), " / ".join(map(short_name, dict.fromkeys(v.rivals))), str(v.ratio), f"{v.p_below:.2f}")
        for (domain, c), v in test.cells.items()
    )
    head = ("domain", "C", "better fixed arm", "auto / better (adjusted)", f"p (below {test.bound:.2f})")
    return Table(head=head, rows=rows, labels=3)


def _latency_table(cells: tuple[CellFigures, ...]) -> Table:
    head = (
        "domain",
        "C",
        "arm",
        "requests",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "p99",
        "E2E p50",
        "accept_len",
    )
    rows = tuple(
        (
            cell.domain,
            str(cell.concurrency),
            short_name(cell.arm),
            str(cell.num_requests),
            *_three(cell.ttft),
            *_three(cell.tpot),
            _ms(cell.e2e.p50),
            NONE if cell.accept_len is None else f"{cell.accept_len:.2f}",
        )
        for cell in sorted(cells, key=lambda c: (c.domain, c.concurrency))
    )
    return Table(head=head, rows=rows, labels=3)


def _three(latency: Latency) -> tuple[str, str, str]:
    return _ms(latency.p50), _ms(latency.p90), _ms(latency.p99)


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def _fingerprint_table(run: Run) -> Table:
    names = run.record.fingerprint.dimensions
    rows = tuple((name, value, "confounds" if name in HARD else "flagged") for name, value in names.items())
    return Table(head=("dimension", "value", "a difference"), rows=rows, labels=3)
