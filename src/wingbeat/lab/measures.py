"""Metrics from records, each defined once. Pure.

TTFT                  first chunk with text - send
TPOT                  (E2E - TTFT) / (n - 1), n from usage
E2E                   last chunk with text - send
output tok/s          tokens that arrived in the steady window / its seconds
accept_len            tokens / target forwards of sequences (sum over sum; plain decoding = 1)
acceptance at i       unconditional u(i): accepted at i / drafted at i;
                      conditional (all before it accepted): u(i) / u(i - 1), u(0) = 1
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wingbeat.errors import LabError
from wingbeat.lab.record import RequestRecord, SpeculationUse

SAMPLE_FLOOR = {0.5: 1, 0.9: 64, 0.95: 130, 0.99: 662}
"""Fewest samples for which a percentile may be printed (MLPerf's early stopping, confidence 0.99)."""


def tokens_until(record: RequestRecord, at_s: float) -> float:
    """Tokens of a request that had arrived by `at_s`.

    With continuous usage this is what the server said; else the n tokens of `usage` spread evenly between first and
    last chunk.
    """
    if record.progress:
        place = bisect_right(record.progress, at_s, key=lambda point: point[0])
        return float(record.progress[place - 1][1]) if place else 0.0
    if record.first_s is None or record.last_s is None or not record.num_tokens or at_s < record.first_s:
        return 0.0
    if at_s >= record.last_s or record.num_tokens == 1:
        return float(record.num_tokens)
    share = (at_s - record.first_s) / (record.last_s - record.first_s)
    return 1.0 + share * (record.num_tokens - 1)


def window_tokens(records: Iterable[RequestRecord], start_s: float, end_s: float) -> float:
    """Tokens that arrived after `start_s`, up to and including `end_s`."""
    return sum(tokens_until(record, end_s) - tokens_until(record, start_s) for record in records)


def missing_usage(records: Iterable[RequestRecord]) -> int:
    """Requests that ended without the server saying how many tokens there were."""
    return sum(r.num_tokens is None and r.error is None and not r.cut for r in records)


def cached_share(records: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens served from the prefix cache over all prompt tokens; None when not reported."""
    known = [r for r in records if r.num_prompt_tokens and r.num_cached_tokens is not None]
    if not known:
        return None
    return sum(r.num_cached_tokens or 0 for r in known) / sum(r.num_prompt_tokens or 0 for r in known)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (nearest rank), or None when there are too few samples to state it."""
    floor = SAMPLE_FLOOR.get(q)
    if floor is None:
        raise LabError(f"percentile q={q} is not offered: one of {sorted(SAMPLE_FLOOR)}")
    if len(values) < floor:
        return None
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]


def add_up(uses: Iterable[SpeculationUse]) -> SpeculationUse:
    """Sum of counts; per-position tuples are padded with zeros."""
    items = list(uses)
    return SpeculationUse(
        num_tokens=sum(u.num_tokens for u in items),
        num_target_forwards=sum(u.num_target_forwards for u in items),
        num_draft_steps=sum(u.num_draft_steps for u in items),
        num_draft_tokens=sum(u.num_draft_tokens for u in items),
        num_accepted_drafts=sum(u.num_accepted_drafts for u in items),
        accepted_per_pos=_add_positions([u.accepted_per_pos for u in items]),
        drafted_per_pos=_add_positions([u.drafted_per_pos for u in items]),
    )


def _add_positions(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))


def accept_len(use: SpeculationUse) -> float | None:
    """Committed tokens per sequence per target forward, bonus included; 1.0 for plain decoding."""
    return use.num_tokens / use.num_target_forwards if use.num_target_forwards else None


@dataclass(frozen=True, slots=True)
class PositionRate:
    """How often drafts at one position were accepted."""

    conditional: float
    unconditional: float
    num_tested: float
    """Drafts that came to be judged: made, and all before them accepted."""


def acceptance_by_position(use: SpeculationUse) -> tuple[PositionRate, ...]:
    """Rates per draft position, position 1 first.

    Depths mix under `auto`: what was accepted at i - 1 in shallower drafts was never tested at i. Unconditional rates
    divide by the drafts made that deep, so their quotient is free of it.
    """
    rates: list[PositionRate] = []
    before = 1.0
    for i, accepted in enumerate(use.accepted_per_pos):
        # Servers that count no drafts per position draft equally deep in every step.
        drafted = use.drafted_per_pos[i] if i < len(use.drafted_per_pos) else use.num_draft_steps
        rate = accepted / drafted if drafted else 0.0
        rates.append(PositionRate(min(rate / before, 1.0) if before else 0.0, rate, drafted * before))
        before = rate
    return tuple(rates)
