"""Figures of a run, from its records. Pure; the formulas of single requests stand in `measures`.

    output tok/s   of a block: tokens that arrived in the steady window / its seconds; a cell: geometric mean of blocks
    percentiles    nearest rank over all requests of a cell; None below the sample floor (p90: 64, p99: 662 requests)
    accept_len     sum of tokens / sum of target forwards of sequences, bonus included: plain decoding is 1
    time share     seconds of a part / seconds of all parts (draft, verify, accept, listen, host)

Blocks marked invalid are left out of everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from wingbeat.lab.ledger import Run
from wingbeat.lab.measures import accept_len, acceptance_by_position, add_up, percentile
from wingbeat.lab.record import BlockRecord, RequestRecord, SpeculationUse
from wingbeat.lab.stats import Cell, Speeds

BASELINES = ("off", "plain", "-")
"""Names an arm without speculation may have, best first."""
PARTS = ("draft", "verify", "accept", "listen", "host")
QUANTILES = (0.5, 0.9, 0.99)
MIN_TESTED = 20
"""A position whose drafts were tested fewer times has no rate worth showing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles of one quantity, in seconds; None where the samples are too few to state it."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """One arm in one cell."""

    arm: str
    domain: str
    concurrency: int
    tokens_per_s: float
    accept_len: float | None
    num_requests: int
    num_blocks: int
    ttft: Latency
    tpot: Latency
    e2e: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAcceptance:
    """How often drafts at one position are accepted, in one arm and domain."""

    arm: str
    domain: str
    position: int
    conditional: float
    unconditional: float
    num_tested: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Shares of step time in one arm at one concurrency, all domains together; they add up to 1."""

    arm: str
    concurrency: int
    shares: tuple[tuple[str, float], ...]


def valid_blocks(run: Run) -> tuple[BlockRecord, ...]:
    """Blocks that may be used."""
    return tuple(block for block in run.blocks if not block.invalid and block.tokens_per_s > 0)


def speeds(run: Run) -> dict[str, Speeds]:
    """Tokens per second: arm -> cell -> block."""
    found: dict[str, dict[Cell, dict[int, float]]] = {arm: {} for arm in arms(run)}
    for block in valid_blocks(run):
        found[block.arm].setdefault((block.domain, block.concurrency), {})[block.block] = block.tokens_per_s
    return {arm: cells for arm, cells in found.items() if cells}


def arms(run: Run) -> tuple[str, ...]:
    """Arms in the order asked for, then any other that was measured."""
    asked = [arm.split("=http", 1)[0] for arm in run.record.plan.arms]
    return tuple(dict.fromkeys([*asked, *(block.arm for block in run.blocks)]))


def baseline(run: Run) -> str | None:
    """The arm without speculation, by name; None when there is none."""
    return next((name for name in BASELINES if name in arms(run)), None)


def is_auto(arm: str) -> bool:
    return arm.split(":")[0] == "auto"


def short_name(arm: str) -> str:
    """always:chain(3) is called chain(3)."""
    return arm.removeprefix("always:")


def cell_figures(run: Run) -> tuple[CellFigures, ...]:
    """Figures of every arm in every cell, in the order of arms, domains and concurrency."""
    blocks, requests = _grouped(valid_blocks(run)), _requests_of_valid_blocks(run)
    order = {arm: i for i, arm in enumerate(arms(run))}
    keys = sorted(blocks, key=lambda key: (order[key[0]], domains(run).index(key[1]), key[2]))
    return tuple(_figures(key, blocks[key], requests.get(key, [])) for key in keys)


def domains(run: Run) -> list[str]:
    """Domains in the order measured."""
    return list(dict.fromkeys(block.domain for block in run.blocks))


def _grouped(blocks: Iterable[BlockRecord]) -> dict[tuple[str, str, int], list[BlockRecord]]:
    groups: dict[tuple[str, str, int], list[BlockRecord]] = defaultdict(list)
    for block in blocks:
        groups[block.arm, block.domain, block.concurrency].append(block)
    return groups


def _requests_of_valid_blocks(run: Run) -> dict[tuple[str, str, int], list[RequestRecord]]:
    usable = {(b.arm, b.domain, b.concurrency, b.block) for b in valid_blocks(run)}
    groups: dict[tuple[str, str, int], list[RequestRecord]] = defaultdict(list)
    for r in run.requests:
        if r.error is None and (r.arm, r.domain, r.concurrency, r.block) in usable:
            groups[r.arm, r.domain, r.concurrency].append(r)
    return groups


def _figures(key: tuple[str, str, int], blocks: list[BlockRecord], requests: list[RequestRecord]) -> CellFigures:
    return CellFigures(
        arm=key[0],
        domain=key[1],
        concurrency=key[2],
        tokens_per_s=float(np.exp(np.mean(np.log([b.tokens_per_s for b in blocks])))),
        accept_len=accept_len(_use(blocks, requests)),
        num_requests=len(requests),
        num_blocks=len(blocks),
        ttft=latency([r.ttft_s for r in requests]),
        tpot=latency([r.tpot_s for r in requests]),
        e2e=latency([r.e2e_s for r in requests]),
    )


def latency(values: Sequence[float | None]) -> Latency:
    """Percentiles of the known values."""
    known = [v for v in values if v is not None]
    p50, p90, p99 = (percentile(known, q) for q in QUANTILES)
    return Latency(p50=p50, p90=p90, p99=p99)


def _use(blocks: Iterable[BlockRecord], requests: Iterable[RequestRecord]) -> SpeculationUse:
    """The server's counters, which include cut requests; else what the requests' usage said."""
    counted = [b.speculation for b in blocks if b.speculation is not None]
    return add_up(counted or [r.speculation for r in requests if r.speculation is not None])


def acceptance(run: Run) -> tuple[PositionAcceptance, ...]:
    """Acceptance by arm, domain and draft position (1 first), all concurrencies together."""
    rows: list[PositionAcceptance] = []
    requests = _requests_of_valid_blocks(run)
    for arm in arms(run):
        for domain in domains(run):
            blocks = [b for b in valid_blocks(run) if (b.arm, b.domain) == (arm, domain)]
            use = _use(blocks, [r for key, group in requests.items() if key[:2] == (arm, domain) for r in group])
            rows += _positions(arm, domain, use)
    return tuple(rows)


def _positions(arm: str, domain: str, use: SpeculationUse) -> list[PositionAcceptance]:
    # A server counts up to the deepest draft it ever made; this arm may never have drafted so deep.
    tested = takewhile(lambda rate: round(rate.num_tested) >= MIN_TESTED, acceptance_by_position(use))
    return [
        PositionAcceptance(
            arm=arm,
            domain=domain,
            position=position,
            conditional=rate.conditional,
            unconditional=rate.unconditional,
            num_tested=round(rate.num_tested),
        )
        for position, rate in enumerate(tested, start=1)
    ]


def time_splits(run: Run) -> tuple[TimeSplit, ...]:
    """Where the server's step time went, per arm and concurrency; empty when it did not say."""
    totals: dict[tuple[str, int], dict[str, float]] = {}
    for block in valid_blocks(run):
        if block.server_time is not None:
            total = totals.setdefault((block.arm, block.concurrency), dict.fromkeys(PARTS, 0.0))
            for part, seconds in block.server_time.model_dump().items():
                total[part.removesuffix("_s")] += seconds
    order = {arm: i for i, arm in enumerate(arms(run))}
    return tuple(
        TimeSplit(arm=arm, concurrency=c, shares=tuple((p, s / sum(total.values())) for p, s in total.items()))
        for (arm, c), total in sorted(totals.items(), key=lambda item: (order[item[0][0]], item[0][1]))
        if sum(total.values()) > 0
    )


def differing_outputs(run: Run, arm: str, base: str) -> tuple[int, int]:
    """(requests whose text differs between two arms, requests compared): same prompt, seed and place, neither cut."""
    texts: dict[str, dict[tuple[str, int, int, int], str]] = {arm: {}, base: {}}
    for r in run.requests:
        if r.arm in texts and r.error is None and not r.cut and r.text_sha:
            texts[r.arm][r.domain, r.concurrency, r.block, r.index] = r.text_sha
    shared = texts[arm].keys() & texts[base].keys()
    return sum(texts[arm][key] != texts[base][key] for key in shared), len(shared)
