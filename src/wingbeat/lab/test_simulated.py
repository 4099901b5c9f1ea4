"""A run made up from a simple law of cost and acceptance: the data of the tests of everything that reads runs."""

from __future__ import annotations

import random
from pathlib import Path

from wingbeat.lab.fingerprint import FACTS, fingerprint
from wingbeat.lab.ledger import RunWriter, read_run
from wingbeat.lab.record import (
    BlockRecord,
    PlanSample,
    RequestRecord,
    RunPlan,
    RunRecord,
    ServerTime,
    SpeculationUse,
)

DOMAINS = {"coding": 0.78, "agentic": 0.66, "encyclopedic": 0.48}
"""Conditional acceptance of the first draft."""
ARMS = ("off", "always:chain(3)", "auto")
POINTS = (1, 2, 4, 8, 16, 32)
TOKENS = 96


def simulated_plan(arms: tuple[str, ...] = ARMS, blocks: int = 4, label: str = "") -> RunPlan:
    return RunPlan(
        kind="parallel",
        url="http://127.0.0.1:8000",
        model="smollm2",
        suites=tuple(f"{name}@1" for name in DOMAINS),
        concurrency=POINTS,
        arms=arms,
        blocks=blocks,
        requests_per_block=None,
        seconds_per_block=4.0,
        max_tokens=TOKENS,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        ignore_eos=True,
        prefix_cache="warm",
        label=label,
    )


def write_simulated_run(
    root: Path,
    run_id: str = "simulated",
    plan: RunPlan | None = None,
    facts: dict[str, str] | None = None,
    noise: float = 0.02,
    speedup: float = 1.0,
) -> Path:
    """The directory of a finished simulated run."""
    plan = plan or simulated_plan()
    told = {names[0]: "simulated" for names in FACTS.values()} | (facts or {})
    record = RunRecord(
        run_id=run_id,
        started_at="2026-01-01T00:00:00Z",
        plan=plan,
        fingerprint=fingerprint(plan, told, "simulated"),
    )
    writer = RunWriter(root, record)
    dice = random.Random(run_id)
    for block in range(plan.blocks):
        for domain, accept in DOMAINS.items():
            for concurrency in plan.concurrency:
                drift = dice.gauss(0, noise)
                for order, arm in enumerate(plan.arms):
                    cell = (domain, accept, concurrency, block)
                    _write_block(writer, cell, (order, arm), speedup, dice, drift, noise)
    return writer.finish("finished")


def expected_tokens(accept: float, depth: int) -> float:
    """Tokens per sequence step when position i is accepted with accept * 0.92 ** i, given all before it."""
    expected, reach = 1.0, 1.0
    for i in range(depth):
        reach *= accept * 0.92**i
        expected += reach
    return expected


def step_seconds(rows: int, draft_steps: int, num_seqs: int) -> dict[str, float]:
    """A knee at 12 rows: nearly free before, full price after."""
    verify = 0.030 + 0.0004 * rows + 0.0011 * max(rows - 12, 0)
    draft = draft_steps * (0.0016 + 0.00012 * num_seqs)
    listen = 0.0004 + 0.00002 * num_seqs
    accept = 0.0005 if draft_steps else 0.0002
    return {"draft": draft, "verify": verify, "accept": accept, "listen": listen, "host": 0.0012}


def depth_of(arm: str, accept: float, concurrency: int) -> int:
    if arm == "off":
        return 0
    if arm.startswith("always"):
        return 3
    rates = {d: expected_tokens(accept, d) / _seconds(d, concurrency) for d in range(6)}
    return max(rates, key=lambda d: rates[d])


def _seconds(depth: int, concurrency: int) -> float:
    return sum(step_seconds(concurrency * (depth + 1), depth, concurrency).values())


def _write_block(
    writer: RunWriter,
    cell: tuple[str, float, int, int],
    turn: tuple[int, str],
    speedup: float,
    dice: random.Random,
    drift: float,
    noise: float,
) -> None:
    (name, accept, concurrency, block), (order, arm) = cell, turn
    depth = depth_of(arm, accept, concurrency)
    rate = concurrency * expected_tokens(accept, depth) / _seconds(depth, concurrency) * speedup
    rate *= 2.718281828 ** (drift + dice.gauss(0, noise))
    seconds = 4.0
    tokens = rate * seconds
    requests = max(round(tokens / TOKENS), concurrency)
    steps = tokens / expected_tokens(accept, depth)
    for index in range(requests):
        start = dice.uniform(0, seconds / 2)
        first = start + dice.uniform(0.05, 0.08) * (1 + concurrency / 8)
        writer.add_request(
            RequestRecord(
                domain=name,
                concurrency=concurrency,
                block=block,
                arm=arm,
                slot=index % concurrency,
                index=index,
                prompt_id=f"{name}-{index % 62:03d}",
                seed=index,
                sent_s=round(start, 4),
                lateness_s=0.0003,
                first_s=round(first, 4),
                last_s=round(first + (TOKENS - 1) * concurrency / rate * dice.uniform(0.92, 1.08), 4),
                num_tokens=TOKENS,
                num_prompt_tokens=64,
                finish_reason="length",
                text_sha=f"{name}-{index}-{block}",
            )
        )
    writer.add_block(
        BlockRecord(
            domain=name,
            concurrency=concurrency,
            block=block,
            arm=arm,
            order=order,
            started_s=block * 400.0,
            window_s=(0.0, seconds),
            window_tokens=round(tokens, 1),
            total_s=seconds,
            total_tokens=round(tokens),
            num_requests=requests,
            num_errors=0,
            num_missing_usage=0,
            server_time=_server_time(depth, concurrency, steps / concurrency),
            speculation=_use(accept, depth, steps, tokens),
            plans=_timeline(arm, accept, concurrency, dice),
        )
    )


def _server_time(depth: int, concurrency: int, num_steps: float) -> ServerTime:
    parts = step_seconds(concurrency * (depth + 1), depth, concurrency)
    return ServerTime(**{f"{part}_s": round(seconds * num_steps, 4) for part, seconds in parts.items()})


def _use(accept: float, depth: int, steps: float, tokens: float) -> SpeculationUse:
    accepted, reach = [], steps
    for i in range(depth):
        reach *= accept * 0.92**i
        accepted.append(round(reach))
    return SpeculationUse(
        num_tokens=round(tokens),
        num_target_forwards=round(steps),
        num_draft_steps=round(steps) if depth else 0,
        num_draft_tokens=round(steps) * depth,
        num_accepted_drafts=sum(accepted),
        accepted_per_pos=tuple(accepted),
        drafted_per_pos=(round(steps),) * depth,
    )


def _timeline(arm: str, accept: float, concurrency: int, dice: random.Random) -> tuple[PlanSample, ...]:
    samples = []
    for i in range(8):
        running = max(concurrency - dice.choice((0, 0, 0, 1)), 1)
        depth = depth_of(arm, accept, running)
        samples.append(PlanSample(at_s=0.5 * i + 0.5, depth=depth, rows=running * (depth + 1), num_running=running))
    return tuple(samples)


def test_the_simulated_run_reads_back_whole(tmp_path):
    run = read_run(write_simulated_run(tmp_path, plan=simulated_plan(blocks=1)))
    assert run.complete
    assert len(run.blocks) == len(DOMAINS) * len(POINTS) * len(ARMS)
