"""Conducts the turns of one run: warm-up, policy, load, judgement, record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from wingbeat.errors import ConfigError, LabError
from wingbeat.lab.arms import Arm
from wingbeat.lab.client import ChatClient, Reply, Sampling
from wingbeat.lab.experiment import BenchSpec, Progress, Watch
from wingbeat.lab.generate import Generated, client_faults, generate
from wingbeat.lab.ledger import RunWriter
from wingbeat.lab.measures import cached_share, missing_usage, window_tokens
from wingbeat.lab.record import BlockRecord, PlanSample
from wingbeat.lab.remote import Counters, Remote, speculation_in, time_in
from wingbeat.lab.suites import Prompt, Suite
from wingbeat.lab.workload import Schedule, Turn, split_warm_up

PLAN_PERIOD_S = 0.5
MAX_ERROR_SHARE = 0.01
WARM_UP_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Station:
    """The server of one arm, as the load generator and as the bookkeeper see it."""

    arm: Arm
    client: ChatClient
    remote: Remote


class Conductor:
    """One run in progress; `notes` collects what a reader of the run must know."""

    def __init__(self, spec: BenchSpec, stations: tuple[Station, ...], writer: RunWriter, watch: Watch) -> None:
        self._spec, self._writer, self._watch = spec, writer, watch
        self._stations = {station.arm.name: station for station in stations}
        self._start = perf_counter()
        self._budget = Budget(spec.budget_s)
        self._cells = list(cells_of(spec.schedule))
        self._done = 0
        self._last: BlockRecord | None = None
        self._can_cut = True
        self.notes: list[str] = []

    async def run_all(self) -> None:
        """Every cell of the schedule, each with all its arms; a cell that would break the budget is left out."""
        await self._warm_up()
        left_out: list[Turn] = []
        for cell in self._cells:
            if self._budget.admits(cell[0].concurrency):
                for turn in cell:
                    await self._turn(turn)
            else:
                left_out.append(cell[0])
        self._budget.close()
        self.notes.extend(left_out_note(left_out))
        self._watch(Progress(done=self._done, total=self._done, text="done", last=self._last))

    def _tell(self, text: str) -> None:
        self._watch(Progress(done=self._done, total=self._expected_turns(), text=text, last=self._last))

    def _expected_turns(self) -> int:
        """How many turns the budget will let run, as far as is known now: what the progress bar counts towards."""
        arms = len(self._stations)
        # A cell under way will be finished whatever the budget says.
        entered = -(-self._done // arms)
        return arms * (entered + self._budget.forecast([cell[0].concurrency for cell in self._cells[entered:]]))

    async def _warm_up(self) -> None:
        """Other prompts in every arm; then, for a warm prefix cache, one token of every prompt to be measured."""
        sampling = self._spec.sampling
        for suite in self._spec.schedule.suites:
            self._tell(f"warm-up: {suite.name}")
            others, _ = split_warm_up(suite)
            for station in self._stations.values():
                await self._prepare(station)
                self._judge_warm_up(station, await self._send_all(station, others, sampling))
            if self._spec.prefix_cache == "warm":
                await self._fill_caches(self._measured(suite))

    async def _fill_caches(self, prompts: tuple[Prompt, ...]) -> None:
        """Once per server, not per arm: policies share their server's cache."""
        sampling = self._spec.sampling
        one = Sampling(max_tokens=1, temperature=sampling.temperature, top_p=sampling.top_p)
        for station in {station.arm.url: station for station in self._stations.values()}.values():
            await self._send_all(station, prompts, one)

    def _measured(self, suite: Suite) -> tuple[Prompt, ...]:
        return split_warm_up(suite)[1][: self._spec.max_prompts]

    async def _send_all(self, station: Station, prompts: tuple[Prompt, ...], sampling: Sampling) -> list[Reply]:
        gate = asyncio.Semaphore(WARM_UP_STREAMS)

        async def send(prompt: Prompt) -> Reply:
            async with gate:
                return await station.client.chat(prompt, sampling, self._spec.seed)

        return list(await asyncio.gather(*(send(prompt) for prompt in prompts)))

    def _judge_warm_up(self, station: Station, replies: list[Reply]) -> None:
        """Fails early when nothing works; learns whether the server reports usage per chunk."""
        if all(reply.error is not None for reply in replies):
            raise LabError(f"arm {station.arm.name!r}: no warm-up request succeeded: {replies[0].error}")
        if any(reply.num_tokens and reply.num_tokens > 1 and not reply.progress for reply in replies):
            self._can_cut = False

    async def _prepare(self, station: Station) -> None:
        """An idle server with the arm's policy and the prefix cache that was asked for."""
        await station.remote.wait_idle()
        if station.arm.policy is not None:
            await station.remote.set_policy(station.arm.policy)
        if self._spec.prefix_cache == "cold" and not await station.remote.reset_prefix_cache():
            url = station.arm.url
            raise ConfigError("prefix_cache", "cold", f"{url} has no /reset_prefix_cache: use warm, salted or as-is")

    async def _turn(self, turn: Turn) -> None:
        self._tell(f"block {turn.block + 1}: {turn.suite.name} C={turn.concurrency} {turn.arm}")
        station = self._stations[turn.arm]
        await self._prepare(station)
        before = await station.remote.counters()
        started = perf_counter()
        plans: list[PlanSample] = []
        poll = asyncio.create_task(_poll_plans(station.remote, plans))
        try:
            out = await self._generate(station, turn)
        finally:
            poll.cancel()
        await station.remote.wait_idle()
        after = await station.remote.counters()
        gained = after.since(before) if before is not None and after is not None else None
        record = judge(turn, out, started - self._start, gained, tuple(plans))
        self._writer.add_block(record)
        self._done, self._last = self._done + 1, record

    async def _generate(self, station: Station, turn: Turn) -> Generated:
        return await generate(
            station.client,
            turn,
            self._measured(turn.suite),
            self._spec.sampling,
            self._spec.seed,
            salted=self._spec.prefix_cache == "salted",
            cut=self._can_cut,
            on_request=self._writer.add_request,
        )


def cells_of(schedule: Schedule) -> Iterator[list[Turn]]:
    """The turns of a schedule, cell by cell: all arms of one domain and concurrency in one block."""
    turns = schedule.turns()
    while cell := list(islice(turns, len(schedule.arms))):
        yield cell


class Budget:
    """Decides before each cell whether it still fits, from how long cells of its concurrency took."""

    def __init__(self, seconds: float | None) -> None:
        self._start, self._seconds = perf_counter(), seconds
        self._took: dict[int, float] = {}
        self._open: tuple[int, float] | None = None

    def admits(self, concurrency: int) -> bool:
        """Whether the next cell may start; the one before it has ended."""
        self.close()
        if self.forecast([concurrency]) == 0:
            return False
        self._open = (concurrency, perf_counter())
        return True

    def forecast(self, cells: Sequence[int]) -> int:
        """How many of these cells (given by concurrency, in order) would still run, if each took as long as before."""
        if self._seconds is None:
            return len(cells)
        spent, fitting = perf_counter() - self._start, 0
        for concurrency in cells:
            guess = self._took.get(concurrency, max(self._took.values(), default=0.0))
            if spent + guess <= self._seconds:
                spent, fitting = spent + guess, fitting + 1
        return fitting

    def close(self) -> None:
        """The cell that ran has ended."""
        if self._open is not None:
            concurrency, started = self._open
            self._took[concurrency] = max(self._took.get(concurrency, 0.0), perf_counter() - started)
            self._open = None


def left_out_note(turns: list[Turn]) -> list[str]:
    """What the time budget cost, in one line; nothing when it cost nothing."""
    if not turns:
        return []
    cells = [f"{turn.suite.name} C={turn.concurrency} (block {turn.block + 1})" for turn in turns]
    shown = ", ".join(cells[:6]) + (f" and {len(cells) - 6} more" if len(cells) > 6 else "")
    return [f"{len(cells)} cells were left out, the time budget was used up: {shown}"]


async def _poll_plans(remote: Remote, plans: list[PlanSample]) -> None:
    """What the policy does, twice a second; ends where the server has no policies."""
    start = perf_counter()
    while (sample := await remote.plan(start)) is not None:
        plans.append(sample)
        await asyncio.sleep(PLAN_PERIOD_S)


def judge(
    turn: Turn, out: Generated, started_s: float, gained: Counters | None, plans: tuple[PlanSample, ...]
) -> BlockRecord:
    """The record of a block, with every reason not to use it."""
    window = (out.busy_from, max(out.busy_until, out.busy_from))
    share = cached_share(out.requests)
    return BlockRecord(
        domain=turn.suite.name,
        concurrency=turn.concurrency,
        block=turn.block,
        arm=turn.arm,
        order=turn.order,
        started_s=round(started_s, 3),
        window_s=(round(window[0], 6), round(window[1], 6)),
        window_tokens=round(window_tokens(out.requests, *window), 3),
        total_s=round(max((r.last_s or r.sent_s for r in out.requests), default=0.0), 6),
        total_tokens=sum(r.num_tokens or 0 for r in out.requests),
        num_requests=len(out.requests),
        num_errors=sum(r.error is not None for r in out.requests),
        num_missing_usage=missing_usage(out.requests),
        cached_share=None if share is None else round(share, 4),
        health=out.health,
        server_time=None if gained is None else time_in(gained),
        speculation=None if gained is None else speculation_in(gained),
        plans=plans,
        invalid=_faults(out, window),
    )


def _faults(out: Generated, window: tuple[float, float]) -> tuple[str, ...]:
    faults = list(client_faults(out.health))
    errors = [r.error for r in out.requests if r.error is not None]
    if len(errors) > MAX_ERROR_SHARE * len(out.requests):
        faults.append(f"{len(errors)} of {len(out.requests)} requests failed, first: {errors[0]}")
    if missing := missing_usage(out.requests):
        faults.append(f"{missing} of {len(out.requests)} requests came without usage: tokens are not guessed")
    if window[1] - window[0] <= 0:
        faults.append("no steady window: the slots were never all busy")
    return tuple(faults)
