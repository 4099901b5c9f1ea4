"""The bench commands from flags to exit code, against a mock server in another thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wingbeat.cli.bench import BenchParallel, BenchSingle, spec_of
from wingbeat.cli.demo import FULL, QUICK, serve_command
from wingbeat.cli.main import main
from wingbeat.lab.ledger import list_runs
from wingbeat.lab.mock import Behaviour, MockServer, mock_server


@pytest.fixture
def served() -> Iterator[tuple[MockServer, str]]:
    found: list[tuple[MockServer, str]] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with mock_server(Behaviour(ttft_s=0.002, step_s=0.01)) as server:
            found.append(server)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield found[0]
    stop.set()
    thread.join(10)


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": str(i)}]}) for i in range(8)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_parallel_prints_blocks_and_keeps_the_run(
    served: tuple[MockServer, str], suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", served[1], "--suite", suite, "--arms", "off", "always:chain(3)", "--concurrency", "1", "2"]
    size = ["--blocks", "1", "--max-tokens", "9", "--requests-per-block", "3", "--json"]
    assert main(["bench", "parallel", *flags, *size, "--out", str(tmp_path / "runs"), "--label", "a/b"]) == 0
    captured = capsys.readouterr()
    blocks = [json.loads(line) for line in captured.out.splitlines()]
    assert [(b["concurrency"], b["arm"]) for b in blocks] == [
        (1, "off"),
        (1, "always:chain(3)"),
        (2, "off"),
        (2, "always:chain(3)"),
    ]
    assert [b["num_requests"] for b in blocks] == [3, 3, 4, 4]
    (record,) = list_runs(tmp_path / "runs")
    assert record.status == "finished"
    assert record.plan.label == "a/b"
    assert record.fingerprint.get("target_digest") == "abc"


def test_single_prints_throughput_and_latency(
    served: tuple[MockServer, str], suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", served[1], "--suite", suite, "--arms", "off", "auto", "--blocks", "2", "--max-tokens", "9"]
    assert main(["bench", "single", *flags, "--requests-per-block", "2", "--out", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    for word in ("mine", "accept_len", "TTFT", "TPOT", "auto x"):
        assert word in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arms", "warp"], "warp"),
        (["--suite", "codng"], "did you mean 'coding'"),
        (["--blocks", "0"], "blocks=0"),
        (["--concurrency", "0"], "concurrency='0'"),
        (["--concurrency", "2", "2"], "each once"),
        (["--arms", "off", "off"], "each name once"),
        (["--model", "llama"], "served at"),
        (["--seconds-per-block", "-1"], "seconds_per_block=-1.0"),
    ],
)
def test_bad_flags_are_refused_by_name(
    served: tuple[MockServer, str],
    suite: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    given = flags if "--suite" in flags else [*flags, "--suite", suite]
    assert main(["bench", "parallel", "--url", served[1], "--out", str(tmp_path / "runs"), *given]) == 2
    assert words in capsys.readouterr().err


def test_the_default_load_is_eight_requests_or_what_the_time_allows(suite: str) -> None:
    assert spec_of(BenchSingle(suite=(suite,))).schedule.load.requests == 8
    timed = spec_of(BenchParallel(suite=(suite,), seconds_per_block=5.0)).schedule
    assert (timed.load.requests, timed.load.seconds) == (None, 5.0)


def test_the_demo_keeps_its_promises() -> None:
    assert FULL.concurrency == (1, 2, 4, 8, 16, 32)
    assert FULL.minutes < 12
    assert QUICK.minutes < 3
    assert serve_command("smollm2", "http://127.0.0.1:81")[1:] == [
        "-m",
        "wingbeat",
        "serve",
        "--model",
        "smollm2",
        "--port",
        "81",
    ]
