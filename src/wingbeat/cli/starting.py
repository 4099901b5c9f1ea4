"""Stages: what a start is waiting for, a line per stage on stderr and one every few seconds within a long one."""

from __future__ import annotations

import sys
from threading import Event, Thread
from time import perf_counter
from types import TracebackType


class Stages:
    """A context that an Engine tells its stages to; seconds count from entering it."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._started = self._said = perf_counter()
        self._stage = ""
        self._ended = Event()
        self._thread = Thread(target=self._remind, name="wingbeat-stages", daemon=True)

    def __enter__(self) -> Stages:
        self._started = self._said = perf_counter()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, stage: str) -> None:
        """The next stage begins."""
        self._stage = stage
        self._say(stage)

    def _say(self, text: str) -> None:
        self._said = perf_counter()
        print(f"[{self._said - self._started:5.1f} s] {text}", file=sys.stderr, flush=True)

    def _remind(self) -> None:
        while not self._ended.wait(self._every_s / 10):
            if self._stage and perf_counter() - self._said >= self._every_s:
                self._say(f"still {self._stage}")
