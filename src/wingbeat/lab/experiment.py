"""What defines a benchmark run, and what its watcher is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wingbeat.errors import ConfigError
from wingbeat.lab.client import Sampling
from wingbeat.lab.record import BlockRecord
from wingbeat.lab.workload import Schedule

PREFIX_CACHE = ("warm", "cold", "salted", "as-is")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """Everything that defines a run."""

    kind: str
    url: str
    model: str | None
    schedule: Schedule
    sampling: Sampling
    seed: int = 0
    prefix_cache: str = "warm"
    """`warm`: every prompt is sent once before it is measured, so that all arms find it cached; `cold`: the cache is
    emptied before each block (needs POST /reset_prefix_cache); `salted`: no arm finds anything (a cache_salt per
    request, needs a server that honours it); `as-is`: nothing is done."""
    max_prompts: int | None = None
    """Use only so many prompts of each suite; None is all."""
    out: Path = Path("out/runs")
    label: str = ""
    budget_s: float | None = None
    """No cell is started that would end after this; a cell runs all its arms or none."""

    def __post_init__(self) -> None:
        if self.prefix_cache not in PREFIX_CACHE:
            raise ConfigError("prefix_cache", self.prefix_cache, f"expected one of {', '.join(PREFIX_CACHE)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands: told before each turn, and once more at the end."""

    done: int
    total: int
    text: str
    last: BlockRecord | None = None


Watch = Callable[[Progress], None]
