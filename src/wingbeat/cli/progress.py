"""A progress bar with the time left, from what a run tells of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from wingbeat.lab.experiment import Progress, Watch


@contextmanager
def watch_run(title: str) -> Iterator[Watch]:
    """A watcher that draws on stderr: a bar on a terminal, a line per cell elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[speed]}"),
    )
    with Bar(*columns, console=console, speed_estimate_period=120) as bar:
        task = bar.add_task(title, total=None, speed="")

        def draw(progress: Progress) -> None:
            bar.update(
                task,
                description=progress.text,
                completed=progress.done,
                total=progress.total,
                speed=describe_last(progress),
            )

        yield draw


def describe_last(progress: Progress) -> str:
    """The block that just ended, in a few words."""
    last = progress.last
    return "" if last is None else f"{last.arm} C={last.concurrency}: {last.tokens_per_s:.0f} tok/s"


def _lines(progress: Progress) -> None:
    print(f"[{progress.done}/{progress.total}] {progress.text}  {describe_last(progress)}", file=sys.stderr, flush=True)
