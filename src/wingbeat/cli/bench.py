"""wingbeat bench single | parallel: measures any OpenAI-compatible server, interleaving the arms of one run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wingbeat.errors import ConfigError
from wingbeat.lab.bench import BenchSpec, run_bench
from wingbeat.lab.client import Sampling
from wingbeat.lab.ledger import Run, read_run
from wingbeat.lab.suites import load_suite
from wingbeat.lab.table import latency_table, problems, throughput_table, valid_blocks
from wingbeat.lab.workload import Load, Schedule

PrefixCache = Literal["warm", "cold", "salted", "as-is"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSingle:
    """Latency of one stream at a time: TTFT, TPOT, E2E and tok/s per domain and arm."""

    url: str = "http://127.0.0.1:8000"
    """The server under test."""
    model: str | None = None
    """Its name there; the first one served when not given."""
    suite: tuple[str, ...] = ("coding", "agentic", "encyclopedic")
    """Shipped suites by name, or JSONL files by path."""
    arms: tuple[str, ...] = ("-",)
    """Policies to set in turn (off, always:chain(3), threshold:4, auto); `-` leaves the server alone; NAME=URL is
    another server. The first is the base of the ratios."""
    max_tokens: int = 96
    """Longest answer."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Request i of a block has the same seed in every arm."""
    ignore_eos: bool = False
    """Answers run to --max-tokens; needs a server that knows the field."""
    blocks: int = 4
    """Repeats of every cell; arms alternate A B, B A, so an even number is fairest."""
    requests_per_block: int | None = None
    """Requests in one block, at least two per stream; 8 when neither this nor seconds are given."""
    seconds_per_block: float | None = None
    """Ends a block after this time; requests under way are cut and counted as far as they came."""
    max_prompts: int | None = None
    """Use only the first prompts of each suite."""
    prefix_cache: PrefixCache = "warm"
    """warm: prompts are sent once before they are measured; cold: emptied before each block; salted: never hit."""
    budget_seconds: float | None = None
    """No cell is started that would end after this."""
    out: Path = Path("out/runs")
    """Where the run's directory is made."""
    label: str = ""
    """Goes into the run's name."""
    json: bool = False
    """Print the run's blocks as JSON lines instead of tables."""

    @property
    def kind(self) -> str:
        return "single"

    @property
    def streams(self) -> tuple[int, ...]:
        return (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchParallel(BenchSingle):
    """Throughput against concurrency: C streams, each sending its next request when the last one ended."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of streams to measure."""

    @property
    def kind(self) -> str:
        return "parallel"

    @property
    def streams(self) -> tuple[int, ...]:
        return self.concurrency


def run(config: BenchSingle) -> int:
    """Measures, prints, and says where the run lies. 0 when every block may be used, 1 when some may not."""
    from wingbeat.cli.progress import watch_run

    spec = spec_of(config)
    with watch_run(f"bench {config.kind}") as watch:
        path = run_bench(spec, watch)
    measured = read_run(path)
    show(measured, as_json=config.json)
    print(f"run: {path}", file=sys.stderr)
    return 0 if measured.blocks and len(valid_blocks(measured)) == len(measured.blocks) else 1


def spec_of(config: BenchSingle) -> BenchSpec:
    """The run that the flags ask for. Raises ConfigError for values that cannot be."""
    _check(config)
    requests = config.requests_per_block
    if requests is None and config.seconds_per_block is None:
        requests = 8
    return BenchSpec(
        kind=config.kind,
        url=config.url,
        model=config.model,
        schedule=Schedule(
            suites=tuple(load_suite(name) for name in config.suite),
            concurrency=config.streams,
            arms=config.arms,
            blocks=config.blocks,
            load=Load(requests=requests, seconds=config.seconds_per_block),
        ),
        sampling=Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            ignore_eos=config.ignore_eos,
        ),
        seed=config.seed,
        prefix_cache=config.prefix_cache,
        max_prompts=config.max_prompts,
        out=config.out,
        label=config.label,
        budget_s=config.budget_seconds,
    )


def _check(config: BenchSingle) -> None:
    at_least_one = {
        "blocks": config.blocks,
        "max_tokens": config.max_tokens,
        "requests_per_block": config.requests_per_block,
        "max_prompts": config.max_prompts,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ConfigError(name, value, "an integer >= 1")
    if not config.streams or min(config.streams) < 1 or len(set(config.streams)) != len(config.streams):
        raise ConfigError("concurrency", " ".join(map(str, config.streams)), "integers >= 1, each once")
    if config.seconds_per_block is not None and config.seconds_per_block <= 0:
        raise ConfigError("seconds_per_block", config.seconds_per_block, "seconds > 0")
    if not config.suite:
        raise ConfigError("suite", "", "at least one")


def show(measured: Run, *, as_json: bool) -> None:
    """Tables, or one JSON line per block, to stdout; what the reader must know to stderr."""
    from rich.console import Console

    if as_json:
        for block in measured.blocks:
            print(block.model_dump_json())
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(throughput_table(measured))
        if measured.record.plan.kind == "single":
            console.print(latency_table(measured))
    for line in problems(measured):
        print(f"note: {line}", file=sys.stderr)
