"""The two loops over the same prepare / run / digest, side by side.

PlainLoop       prepare t, run t, digest t.
OverlappedLoop  prepare t+1 and hand it over while t still runs, then digest t: results are read one step late. The
                host works with upper bounds of lengths; a sequence that ended unseen costs at most one more step, its
                surplus dropped. Both give the same tokens (tested).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from wingbeat.engine.core import EngineCore
from wingbeat.engine.pending import Pending
from wingbeat.engine.scheduler import MustDrain
from wingbeat.engine.step import StepResult
from wingbeat.types import ChoiceDelta


class Loop(Protocol):
    @property
    def has_unread(self) -> bool:
        """A step was handed over whose results nobody has seen."""
        ...

    def step(self) -> list[ChoiceDelta]:
        """Runs (or hands over) one step and returns what has become known since the last call."""
        ...

    def drain(self) -> list[ChoiceDelta]:
        """Reads whatever is still unread."""
        ...

    def close(self) -> None: ...


class PlainLoop:
    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def has_unread(self) -> bool:
        return False

    def step(self) -> list[ChoiceDelta]:
        pending = self._core.prepare(unread=False)
        if pending is None:
            self._core.observer.idle()
            return []
        return self._core.digest(pending, self._core.stepper.run(pending.step))

    def drain(self) -> list[ChoiceDelta]:
        return []

    def close(self) -> None:
        pass


class OverlappedLoop:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wingbeat-step")
        self._unread: tuple[Pending, Future[StepResult]] | None = None

    @property
    def has_unread(self) -> bool:
        return self._unread is not None

    def step(self) -> list[ChoiceDelta]:
        try:
            pending = self._core.prepare(unread=self.has_unread)
        except MustDrain:
            return self.drain()
        following = None
        if pending is not None:
            following = (pending, self._device.submit(self._core.stepper.run, pending.step))
        deltas = self.drain()
        self._unread = following
        if following is None:
            self._core.observer.idle()
        return deltas

    def drain(self) -> list[ChoiceDelta]:
        if self._unread is None:
            return []
        (pending, future), self._unread = self._unread, None
        return self._core.digest(pending, future.result())

    def close(self) -> None:
        self._device.shutdown(wait=True)
