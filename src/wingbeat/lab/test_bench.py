"""Whole runs against mock servers with a known truth: order, pairing, throughput, records on disk, refusals."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path

import pytest

from wingbeat.errors import ConfigError, LabError
from wingbeat.lab.bench import BenchSpec, run_bench
from wingbeat.lab.client import Sampling
from wingbeat.lab.conduct import Budget
from wingbeat.lab.ledger import Run, read_run
from wingbeat.lab.mock import Behaviour, MockServer, mock_server
from wingbeat.lab.suites import load_suite
from wingbeat.lab.workload import Load, Schedule

SIX = Load(requests=6)
FAST: dict[str, float] = {"ttft_s": 0.005, "step_s": 0.004}


@pytest.fixture
def suite_path(tmp_path: Path) -> str:
    path = tmp_path / "small.jsonl"
    rows = [
        {"id": f"p{i}", "domain": "small", "messages": [{"role": "user", "content": f"question {i}"}]}
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def bench(
    tmp_path: Path,
    suite_path: str,
    behaviour: Behaviour,
    *,
    arms: tuple[str, ...] = ("off", "always:chain(3)"),
    load: Load = SIX,
    concurrency: tuple[int, ...] = (2,),
    blocks: int = 2,
    budget_s: float | None = None,
    prefix_cache: str = "warm",
    second: Behaviour | None = None,
) -> tuple[Run, MockServer]:
    """One run over mock servers; `URL2` in an arm is the address of the second."""

    async def run() -> tuple[Path, MockServer]:
        async with mock_server(behaviour) as (mock, url), mock_server(second) as (_, url2):
            spec = BenchSpec(
                kind="parallel",
                url=url,
                model=None,
                schedule=Schedule(
                    suites=(load_suite(suite_path),),
                    concurrency=concurrency,
                    arms=tuple(arm.replace("URL2", url2) for arm in arms),
                    blocks=blocks,
                    load=load,
                ),
                sampling=Sampling(max_tokens=17),
                prefix_cache=prefix_cache,
                out=tmp_path / "runs",
                budget_s=budget_s,
            )
            return await asyncio.wait_for(asyncio.to_thread(run_bench, spec), 60), mock

    path, mock = asyncio.run(run())
    return read_run(path), mock


def test_arms_alternate_and_meet_the_same_requests(tmp_path: Path, suite_path: str) -> None:
    run, mock = bench(tmp_path, suite_path, Behaviour(**FAST))
    assert [(b.block, b.arm, b.order) for b in run.blocks] == [
        (0, "off", 0),
        (0, "always:chain(3)", 1),
        (1, "always:chain(3)", 0),
        (1, "off", 1),
    ]
    asked = defaultdict(set)
    for r in run.requests:
        asked[r.block, r.arm].add((r.index, r.prompt_id, r.seed))
    assert asked[0, "off"] == asked[0, "always:chain(3)"]
    assert asked[1, "off"] == asked[1, "always:chain(3)"]
    assert asked[0, "off"] != asked[1, "off"]
    assert not {r.prompt_id for r in run.requests} & {"p0", "p1"}  # those warm up
    assert run.complete
    assert not any(b.invalid for b in run.blocks)
    assert mock.behaviour.policy == "off"  # as it was found


def test_throughput_is_the_servers(tmp_path: Path, suite_path: str) -> None:
    """C streams at one token (or four) per step: known tokens per second, prefill excluded by making it short."""
    behaviour = Behaviour(ttft_s=0.0, step_s=0.02)
    run, _ = bench(tmp_path, suite_path, behaviour, load=Load(requests=8), blocks=1)
    off, always = run.blocks
    assert off.tokens_per_s == pytest.approx(2 * 17 / (17 * 0.02), rel=0.2)
    assert always.tokens_per_s == pytest.approx(2 * 17 / (5 * 0.02), rel=0.3)
    assert always.tokens_per_s / off.tokens_per_s == pytest.approx(17 / 5, rel=0.3)
    assert off.speculation is not None
    assert always.speculation is not None
    assert off.speculation.num_tokens == 8 * 17
    assert off.speculation.num_target_forwards == 8 * 17
    assert always.speculation.num_target_forwards == 8 * 5
    assert always.server_time is not None
    assert always.server_time.verify_s == pytest.approx(3 * always.server_time.draft_s)
    assert any(plan.depth == 3 for plan in always.plans)


def test_time_boxed_blocks_cut_requests_and_count_what_came(tmp_path: Path, suite_path: str) -> None:
    behaviour = Behaviour(ttft_s=0.0, step_s=0.05)
    run, mock = bench(tmp_path, suite_path, behaviour, load=Load(seconds=0.6), arms=("off",), blocks=1)
    (block,) = run.blocks
    assert all(r.cut for r in run.requests)
    assert block.total_s <= 0.7
    assert block.tokens_per_s == pytest.approx(2 / 0.05, rel=0.15)
    assert mock.seen.running == 0


def test_without_usage_nothing_is_measured(tmp_path: Path, suite_path: str) -> None:
    run, _ = bench(tmp_path, suite_path, Behaviour(**FAST, fault="missing_usage"), arms=("off",), blocks=1)
    (block,) = run.blocks
    assert block.num_missing_usage == 6
    assert block.total_tokens == 0
    assert "without usage" in block.invalid[0]


def test_failing_requests_make_a_block_invalid_and_are_kept(tmp_path: Path, suite_path: str) -> None:
    run, _ = bench(tmp_path, suite_path, Behaviour(**FAST, fault="http_500", fault_every=3), arms=("off",), blocks=1)
    (block,) = run.blocks
    assert block.num_errors == 2
    assert len(run.requests) == 6
    assert "2 of 6 requests failed" in block.invalid[0]
    assert "HTTP 500" in block.invalid[0]


def test_a_server_that_fails_always_ends_the_run(tmp_path: Path, suite_path: str) -> None:
    with pytest.raises(LabError, match="no warm-up request succeeded"):
        bench(tmp_path, suite_path, Behaviour(**FAST, fault="http_500"))


def test_a_plain_server_runs_the_dash_arm_only(tmp_path: Path, suite_path: str) -> None:
    run, _ = bench(tmp_path, suite_path, Behaviour(**FAST, policy=None), arms=("-",), blocks=1)
    assert run.blocks[0].plans == ()
    with pytest.raises(ConfigError, match="no /v1/speculation"):
        bench(tmp_path, suite_path, Behaviour(**FAST, policy=None), arms=("auto",))


def test_another_server_can_be_an_arm(tmp_path: Path, suite_path: str) -> None:
    slow = Behaviour(ttft_s=0.0, step_s=0.02, policy=None)
    fast = Behaviour(ttft_s=0.0, step_s=0.005)
    run, _ = bench(tmp_path, suite_path, fast, arms=("off", "peer=URL2"), second=slow, blocks=1)
    off, peer = run.blocks
    assert (off.arm, peer.arm) == ("off", "peer")
    assert off.tokens_per_s > 2 * peer.tokens_per_s
    assert run.record.plan.arms == ("off", "peer")


def test_the_budget_leaves_out_whole_cells_and_says_so(tmp_path: Path, suite_path: str) -> None:
    behaviour = Behaviour(ttft_s=0.0, step_s=0.01)
    run, _ = bench(tmp_path, suite_path, behaviour, blocks=50, budget_s=3.0, concurrency=(1, 2))
    assert 4 <= len(run.blocks) < 200
    assert len(run.blocks) % 2 == 0
    assert "cells were left out" in run.record.notes[0]


def test_a_cold_cache_is_emptied_before_every_block(tmp_path: Path, suite_path: str) -> None:
    _, mock = bench(tmp_path, suite_path, Behaviour(**FAST), prefix_cache="cold", blocks=1)
    assert mock.seen.resets == 2 + 2  # two arms warm up, two are measured


def test_a_run_without_a_server_says_where_it_looked(tmp_path: Path, suite_path: str) -> None:
    schedule = Schedule(
        suites=(load_suite(suite_path),), concurrency=(1,), arms=("-",), blocks=1, load=Load(requests=1)
    )
    spec = BenchSpec(
        kind="single", url="http://127.0.0.1:9", model=None, schedule=schedule, sampling=Sampling(), out=tmp_path
    )
    with pytest.raises(LabError, match=r"127\.0\.0\.1:9"):
        run_bench(spec)


def test_the_first_cell_always_fits_unless_nothing_does() -> None:
    assert Budget(None).admits(1)
    assert Budget(10.0).admits(1)
    assert not Budget(-1.0).admits(1)
