"""Closed-loop load: C slots, each sending the next prompt of the block as soon as its last answer ended.

The slots share one counter, so request i of a block is prompt i with seed i whoever sends it, in every arm. Meanwhile
the generator watches itself: a block in which the client was the limit says so and is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, process_time

import numpy as np

from wingbeat.lab.client import ChatClient, Reply, Sampling
from wingbeat.lab.record import ClientHealth, RequestRecord
from wingbeat.lab.suites import Prompt
from wingbeat.lab.workload import Turn, prompt_at, seed_at

MAX_LOST_SHARE = 0.02
MAX_CPU_SHARE = 0.90
MAX_LOOP_LAG_S = 0.25
LAG_PERIOD_S = 0.02
ERROR_PAUSE_S = 0.05
"""A server that refuses at once must not be hammered."""


@dataclass(slots=True, kw_only=True)
class Generated:
    """Raw outcome of one turn; times in seconds since `start` (a perf_counter time)."""

    start: float
    requests: list[RequestRecord] = field(default_factory=list[RequestRecord])
    busy_from: float = 0.0
    """When the last slot sent its first request."""
    busy_until: float = 0.0
    """When the first slot found nothing more to send, or time was over."""
    end: float = 0.0
    health: ClientHealth = field(default_factory=ClientHealth)


class _Source:
    """Hands out request numbers until the count or the time is used up."""

    def __init__(self, turn: Turn, start: float) -> None:
        self._limit = turn.load.requests
        self.stop_at = None if turn.load.seconds is None else start + turn.load.seconds
        self._next = 0
        self.dry_at: float | None = None

    def take(self) -> int | None:
        over = self.stop_at is not None and perf_counter() >= self.stop_at
        if over or (self._limit is not None and self._next >= self._limit):
            if self.dry_at is None:
                self.dry_at = perf_counter()
            return None
        self._next += 1
        return self._next - 1

    @property
    def busy_until(self) -> float:
        """The moment from which not every slot was busy."""
        dry = perf_counter() if self.dry_at is None else self.dry_at
        return dry if self.stop_at is None else min(dry, self.stop_at)


async def generate(
    client: ChatClient,
    turn: Turn,
    prompts: tuple[Prompt, ...],
    sampling: Sampling,
    seed: int,
    *,
    salted: bool = False,
    cut: bool = True,
    on_request: Callable[[RequestRecord], None] = lambda record: None,
) -> Generated:
    """Runs one turn to its end; `on_request` is called as each request finishes.

    `cut`: when the time of the block is over, end requests in flight at once (needs usage per chunk); else await them.
    """
    out = Generated(start=perf_counter())
    source = _Source(turn, out.start)
    lags: list[float] = []
    probe, cpu = asyncio.create_task(_probe_lag(lags)), process_time()

    async def slot(number: int) -> None:
        free_at = out.start
        while (index := source.take()) is not None:
            prompt, its_seed = prompt_at(prompts, turn.block, turn.concurrency, index), seed_at(seed, turn.block, index)
            salt = f"{turn.block}-{turn.arm}-{turn.concurrency}-{index}" if salted else None
            reply = await client.chat(prompt, sampling, its_seed, stop_at=source.stop_at if cut else None, salt=salt)
            record = _record(turn, number, index, prompt, its_seed, free_at, reply, out.start)
            if reply.error is not None:
                await asyncio.sleep(ERROR_PAUSE_S)
            free_at = perf_counter()
            out.requests.append(record)
            on_request(record)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(turn.concurrency):
                group.create_task(slot(number))
    finally:
        probe.cancel()
    out.end = perf_counter() - out.start
    out.busy_from = max((r.sent_s for r in out.requests if r.index < turn.concurrency), default=0.0)
    out.busy_until = source.busy_until - out.start
    out.health = _health(turn, out, lags, process_time() - cpu)
    return out


async def _probe_lag(lags: list[float]) -> None:
    """Measures how late the event loop wakes: time during which a chunk would have been stamped late."""
    due = perf_counter() + LAG_PERIOD_S
    while True:
        await asyncio.sleep(max(due - perf_counter(), 0.0))
        now = perf_counter()
        lags.append(now - due)
        due = max(due, now) + LAG_PERIOD_S


def _record(
    turn: Turn, slot: int, index: int, prompt: Prompt, seed: int, free_at: float, reply: Reply, start: float
) -> RequestRecord:
    return RequestRecord(
        domain=turn.suite.name,
        concurrency=turn.concurrency,
        block=turn.block,
        arm=turn.arm,
        slot=slot,
        index=index,
        prompt_id=prompt.id,
        seed=seed,
        sent_s=round(reply.sent - start, 6),
        lateness_s=round(reply.sent - free_at, 6),
        first_s=None if reply.first is None else round(reply.first - start, 6),
        last_s=None if reply.last is None else round(reply.last - start, 6),
        num_tokens=reply.num_tokens,
        num_prompt_tokens=reply.num_prompt_tokens,
        num_cached_tokens=reply.num_cached_tokens,
        num_chunks=reply.num_chunks,
        progress=tuple((round(at - start, 4), n) for at, n in reply.progress),
        finish_reason=reply.finish_reason,
        text_sha=reply.text_sha,
        cut=reply.cut,
        error=reply.error,
        speculation=reply.speculation,
    )


def _health(turn: Turn, out: Generated, lags: list[float], cpu_s: float) -> ClientHealth:
    late = [record.lateness_s for record in out.requests]
    return ClientHealth(
        loop_lag_p99_s=round(float(np.quantile(lags, 0.99)), 6) if lags else 0.0,
        send_lateness_p99_s=round(float(np.quantile(late, 0.99)), 6) if late else 0.0,
        lost_share=round(sum(late) / max(out.end * turn.concurrency, 1e-9), 6),
        cpu_share=round(cpu_s / max(out.end, 1e-9), 4),
    )


def client_faults(health: ClientHealth) -> tuple[str, ...]:
    """Why the load generator itself limited the block; empty when it did not."""
    limits = (
        ("client CPU share", health.cpu_share, MAX_CPU_SHARE),
        ("share of slot time lost before sending", health.lost_share, MAX_LOST_SHARE),
        ("event-loop lag p99 in s", health.loop_lag_p99_s, MAX_LOOP_LAG_S),
    )
    return tuple(f"{name} {value:.3f} > {limit}" for name, value, limit in limits if value > limit)
