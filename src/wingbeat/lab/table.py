"""The table a run prints: domain x concurrency, one column of tok/s per arm, ratios to the first arm, accept_len."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from rich.table import Table

from wingbeat.lab.ledger import Run
from wingbeat.lab.measures import accept_len, add_up
from wingbeat.lab.record import BlockRecord
from wingbeat.lab.stats import Cell, Ratio, paired_log_ratios, pooled_intervals

NOTHING = "-"


def valid_blocks(run: Run) -> list[BlockRecord]:
    """Blocks that may be used."""
    return [block for block in run.blocks if not block.invalid]


def speeds_by_arm(run: Run) -> dict[str, dict[Cell, dict[int, float]]]:
    """Output tok/s in the steady window: arm -> (domain, concurrency) -> block -> value; valid blocks only."""
    speeds: dict[str, dict[Cell, dict[int, float]]] = {arm: defaultdict(dict) for arm in run.record.plan.arms}
    for block in valid_blocks(run):
        speeds[block.arm][block.domain, block.concurrency][block.block] = block.tokens_per_s
    return speeds


def ratios_to_first(run: Run) -> dict[str, dict[Cell, Ratio]]:
    """Paired block by block; every arm but the first, interval from the spread between blocks pooled over cells."""
    speeds = speeds_by_arm(run)
    first, *others = run.record.plan.arms
    return {arm: pooled_intervals(paired_log_ratios(speeds[arm], speeds[first])) for arm in others}


def accept_len_of(run: Run, arm: str, cell: Cell) -> float | None:
    """Committed tokens per sequence per target forward over all valid blocks of a cell."""
    blocks = [b for b in valid_blocks(run) if b.arm == arm and (b.domain, b.concurrency) == cell]
    return accept_len(add_up(b.speculation for b in blocks if b.speculation is not None))


def throughput_table(run: Run) -> Table:
    """One row per domain and concurrency: median tok/s over blocks, ratio and interval, accept_len."""
    arms = run.record.plan.arms
    speeds, ratios = speeds_by_arm(run), ratios_to_first(run)
    table = Table(title=f"output tok/s by arm, median of blocks; x is the ratio to {arms[0]}", title_justify="left")
    table.add_column("domain")
    table.add_column("C", justify="right")
    for arm in arms:
        table.add_column(arm, justify="right")
    for arm in arms[1:]:
        table.add_column(f"{arm} x", justify="right")
    for arm in arms:
        table.add_column(f"accept_len {arm}", justify="right")
    for cell in sorted({cell for of_arm in speeds.values() for cell in of_arm}, key=lambda c: _place(run, c)):
        fast = [_number(median(speeds[arm][cell].values()) if speeds[arm].get(cell) else None, 0) for arm in arms]
        pairs = [str(ratios[arm].get(cell, NOTHING)) for arm in arms[1:]]
        lengths = [_number(accept_len_of(run, arm, cell), 2) for arm in arms]
        table.add_row(cell[0], str(cell[1]), *fast, *pairs, *lengths)
    return table


def latency_table(run: Run) -> Table:
    """One row per domain, concurrency and arm: median TTFT, TPOT and E2E of the requests that ran to their end."""
    groups: dict[tuple[int, str, int, str], list[tuple[float, float, float]]] = defaultdict(list)
    for r in run.requests:
        if r.error is None and r.ttft_s is not None and r.tpot_s is not None and r.e2e_s is not None:
            place = _place(run, (r.domain, r.concurrency))[0]
            groups[place, r.domain, r.concurrency, r.arm].append((r.ttft_s, r.tpot_s, r.e2e_s))
    table = Table(title="latency, medians in ms", title_justify="left")
    for name in ("domain", "C", "arm", "requests", "TTFT", "TPOT", "E2E"):
        table.add_column(name, justify="left" if name in ("domain", "arm") else "right")
    order = {arm: i for i, arm in enumerate(run.record.plan.arms)}
    for (_, domain, concurrency, arm), rows in sorted(groups.items(), key=lambda g: (*g[0][:3], order[g[0][3]])):
        medians = [f"{median(column) * 1e3:.1f}" for column in zip(*rows, strict=True)]
        table.add_row(domain, str(concurrency), arm, str(len(rows)), *medians)
    return table


def problems(run: Run) -> list[str]:
    """What the reader of the tables must know: notes of the run, blocks that were not used and why."""
    invalid = [b for b in run.blocks if b.invalid]
    lines = list(run.record.notes)
    for b in invalid[:5]:
        lines.append(f"not used: {b.domain} C={b.concurrency} {b.arm} block {b.block + 1}: {'; '.join(b.invalid)}")
    if len(invalid) > 5:
        lines.append(f"and {len(invalid) - 5} more blocks were not used")
    return lines


def _place(run: Run, cell: Cell) -> tuple[int, int]:
    """Domains in the order of the plan, then by concurrency."""
    names = [suite.partition("@")[0] for suite in run.record.plan.suites]
    return names.index(cell[0]) if cell[0] in names else len(names), cell[1]


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
