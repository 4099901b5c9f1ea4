"""wingbeat demo: serve, sweep, report. Does speculation pay on this machine, and where does it stop paying?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from wingbeat.cli.progress import watch_run
from wingbeat.lab.bench import BenchSpec, run_bench
from wingbeat.lab.client import Sampling
from wingbeat.lab.ledger import Run, read_run
from wingbeat.lab.subject import free_port, subject
from wingbeat.lab.suites import SHIPPED, Suite, load_suite
from wingbeat.lab.table import problems, throughput_table, valid_blocks
from wingbeat.lab.workload import Load, Schedule

ARMS = ("off", "always:chain(3)", "auto")
START_TIMEOUT_S = 180.0
REPORT_S = 25.0
"""Kept back from the time limit for tables, picture and page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Serves the embedded model, sweeps concurrency over three policies and three domains, writes a report."""

    quick: bool = False
    """Under 3 minutes instead of under 12: fewer streams, shorter answers, wider intervals."""
    out: Path = Path("out/demo")
    """Where report.html, report.png, the runs and the server's log go."""
    model: str = "smollm2"
    """The embedded model, or a directory."""
    suite: tuple[str, ...] = SHIPPED
    """Shipped suites by name, or JSONL files by path."""
    minutes: float | None = None
    """Time limit; 11.5, or 2.8 with --quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How much is measured."""

    concurrency: tuple[int, ...]
    max_tokens: int
    requests: int
    blocks: int
    max_prompts: int
    minutes: float


FULL = Sweep(concurrency=(1, 2, 4, 8, 16, 32), max_tokens=64, requests=6, blocks=4, max_prompts=32, minutes=11.5)
QUICK = Sweep(concurrency=(1, 4, 16, 32), max_tokens=32, requests=4, blocks=2, max_prompts=16, minutes=2.8)


def run(config: Demo) -> int:
    """0 when the sweep was measured and the report written, 1 otherwise. The server is stopped whatever happens."""
    sweep = QUICK if config.quick else FULL
    suites = tuple(load_suite(name) for name in config.suite)
    minutes = config.minutes or sweep.minutes
    deadline = monotonic() + 60 * minutes
    say(f"does speculation pay on this machine? The answer takes at most {minutes:g} minutes.")
    url = f"http://127.0.0.1:{free_port()}"
    log = config.out / "server.log"
    with subject(serve_command(config.model, url), url, log, timeout_s=START_TIMEOUT_S, tell=Waiting()):
        say(f"{config.model} is served at {url}; sweeping {' / '.join(ARMS)} over C={_list(sweep.concurrency)}")
        path = _measure(config, sweep, suites, url, deadline - monotonic() - REPORT_S)
    measured = read_run(path)
    return conclude(measured, config.out)


def serve_command(model: str, url: str) -> list[str]:
    """The server the user would start by hand."""
    port = url.rpartition(":")[2]
    return [sys.executable, "-m", "wingbeat", "serve", "--model", model, "--port", port]


class Waiting:
    """Says every five seconds that the server is still starting."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, waited_s: float) -> None:
        if waited_s >= self._next:
            say(f"starting the server: loading the model, timing its steps ... {waited_s:.0f} s")
            self._next += 5.0


def _measure(config: Demo, sweep: Sweep, suites: tuple[Suite, ...], url: str, budget_s: float) -> Path:
    spec = BenchSpec(
        kind="parallel",
        url=url,
        model=None,
        schedule=Schedule(
            suites=suites,
            concurrency=sweep.concurrency,
            arms=ARMS,
            blocks=sweep.blocks,
            load=Load(requests=sweep.requests),
        ),
        sampling=Sampling(max_tokens=sweep.max_tokens),
        max_prompts=sweep.max_prompts,
        out=config.out / "runs",
        label="demo-quick" if config.quick else "demo",
        budget_s=budget_s,
    )
    with watch_run("sweep") as watch:
        return run_bench(spec, watch)


def conclude(measured: Run, out: Path) -> int:
    """Prints table, verdict and what was left out; writes the report. 1 when nothing valid was measured."""
    from rich.console import Console

    from wingbeat.lab.report import write_report
    from wingbeat.lab.verdict import verdict_lines

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(throughput_table(measured))
    if not valid_blocks(measured):
        say("\n".join([f"nothing valid was measured; the records are in {measured.path}", *problems(measured)]))
        return 1
    for line in verdict_lines(measured):
        console.print(line, highlight=False)
    written = write_report(measured.path, out / "report.html")
    say(f"wrote {', '.join(map(str, written))}; records: {measured.path}")
    return 0


def say(text: str) -> None:
    """One line of progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
