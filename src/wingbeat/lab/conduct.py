"""Conducts the turns of one run: warm-up, policy, load, judgement, record."""

from __future__ import annotations

import asyncio
from time import perf_counter

from wingbeat.errors import LabError
from wingbeat.lab.client import ChatClient, Reply, Sampling
from wingbeat.lab.experiment import NO_ARM, BenchSpec, Progress, Watch
from wingbeat.lab.generate import Generated, client_faults, generate
from wingbeat.lab.ledger import RunWriter
from wingbeat.lab.measures import cached_share, missing_usage, window_tokens
from wingbeat.lab.record import BlockRecord, PlanSample
from wingbeat.lab.remote import Counters, Remote, speculation_in, time_in
from wingbeat.lab.suites import Prompt
from wingbeat.lab.workload import Turn, split_warm_up

PLAN_PERIOD_S = 0.5
MAX_ERROR_SHARE = 0.01
WARM_UP_STREAMS = 8


class Conductor:
    """One run in progress; `notes` collects what a reader of the run must know."""

    def __init__(self, spec: BenchSpec, client: ChatClient, remote: Remote, writer: RunWriter, watch: Watch) -> None:
        self._spec, self._client, self._remote, self._writer, self._watch = spec, client, remote, writer, watch
        self._start = perf_counter()
        self._done = 0
        self._last: BlockRecord | None = None
        self._can_cut = True
        self.notes: list[str] = []

    async def run_all(self) -> None:
        """Every turn of the schedule; stops between blocks when the next would break the budget."""
        await self._warm_up()
        schedule = self._spec.schedule
        block, block_started, longest = 0, perf_counter(), 0.0
        for turn in schedule.turns():
            if turn.block != block:
                longest = max(longest, perf_counter() - block_started)
                block, block_started = turn.block, perf_counter()
                if self._out_of_time(longest, block):
                    break
            await self._turn(turn)
        self._tell("done")

    def _out_of_time(self, longest: float, block: int) -> bool:
        budget = self._spec.budget_s
        if budget is None or perf_counter() - self._start + longest <= budget:
            return False
        self.notes.append(f"stopped after {block} of {self._spec.schedule.blocks} blocks: the time budget was used up")
        return True

    def _tell(self, text: str) -> None:
        total = self._spec.schedule.num_turns
        self._watch(Progress(done=self._done, total=total, text=text, last=self._last))

    async def _warm_up(self) -> None:
        """Other prompts in every arm; then, for a warm prefix cache, one token of every prompt to be measured."""
        sampling = self._spec.sampling
        for suite in self._spec.schedule.suites:
            self._tell(f"warm-up: {suite.name}")
            others, _ = split_warm_up(suite)
            for arm in self._spec.schedule.arms:
                await self._set_arm(arm)
                self._judge_warm_up(await self._send_all(others, sampling))
            if self._spec.prefix_cache == "warm":
                one = Sampling(max_tokens=1, temperature=sampling.temperature, top_p=sampling.top_p)
                await self._send_all(self._measured(suite.prompts, others), one)

    def _measured(self, prompts: tuple[Prompt, ...], others: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
        rest = prompts[len(others) :] or prompts
        return rest[: self._spec.max_prompts]

    async def _send_all(self, prompts: tuple[Prompt, ...], sampling: Sampling) -> list[Reply]:
        gate = asyncio.Semaphore(WARM_UP_STREAMS)

        async def send(prompt: Prompt) -> Reply:
            async with gate:
                return await self._client.chat(prompt, sampling, self._spec.seed)

        return list(await asyncio.gather(*(send(prompt) for prompt in prompts)))

    def _judge_warm_up(self, replies: list[Reply]) -> None:
        """Fails early when nothing works; learns whether the server reports usage per chunk."""
        if all(reply.error is not None for reply in replies):
            raise LabError(f"no warm-up request succeeded: {replies[0].error}")
        if any(reply.num_tokens and reply.num_tokens > 1 and not reply.progress for reply in replies):
            self._can_cut = False

    async def _set_arm(self, arm: str) -> None:
        if arm != NO_ARM:
            await self._remote.wait_idle()
            await self._remote.set_policy(arm)

    async def _turn(self, turn: Turn) -> None:
        self._tell(f"block {turn.block + 1}: {turn.suite.name} C={turn.concurrency} {turn.arm}")
        await self._set_arm(turn.arm)
        before = await self._remote.counters()
        started = perf_counter()
        plans: list[PlanSample] = []
        poll = asyncio.create_task(self._poll_plans(plans)) if turn.arm != NO_ARM else None
        others, _ = split_warm_up(turn.suite)
        try:
            out = await generate(
                self._client,
                turn,
                self._measured(turn.suite.prompts, others),
                self._spec.sampling,
                self._spec.seed,
                salted=self._spec.prefix_cache == "salted",
                cut=self._can_cut,
                on_request=self._writer.add_request,
            )
        finally:
            if poll is not None:
                poll.cancel()
        after = await self._remote.counters()
        gained = after.since(before) if before is not None and after is not None else None
        record = judge(turn, out, started - self._start, gained, tuple(plans))
        self._writer.add_block(record)
        self._done, self._last = self._done + 1, record

    async def _poll_plans(self, plans: list[PlanSample]) -> None:
        start = perf_counter()
        while True:
            await asyncio.sleep(PLAN_PERIOD_S)
            sample = await self._remote.plan(start)
            if sample is not None:
                plans.append(sample)


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
