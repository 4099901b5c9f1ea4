"""Stream: what the engine says about the requests of one HTTP call, in the order it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from time import perf_counter

from wingbeat.types import ChoiceDelta, Request


class Stream:
    """The deltas of the requests of one HTTP call, in batches as they come. Lives on the event loop."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.num_open = {request.request_id: request.params.n for request in requests}
        """Choices of each request that have not ended."""
        self.arrived = perf_counter()
        self.last_token_at = [0.0] * sum(self.num_open.values())
        self._offsets = dict(zip(self.num_open, accumulate(self.num_open.values(), initial=0), strict=False))
        self._ready: list[ChoiceDelta] = []
        self._wake = asyncio.Event()

    def index_of(self, delta: ChoiceDelta) -> int:
        """The choice's place in the answer: prompts in order, and their choices in order."""
        return self._offsets[delta.request_id] + delta.choice_index

    def push(self, deltas: Sequence[ChoiceDelta]) -> None:
        self._ready.extend(deltas)
        for delta in deltas:
            self.num_open[delta.request_id] -= delta.finish_reason is not None
        self._wake.set()

    def fail(self, request_id: str, reason: str) -> None:
        """Ends a request's choices with an error."""
        self._ready.append(
            ChoiceDelta(
                request_id=request_id, choice_index=0, token_ids=(), text="", finish_reason="error", error=reason
            )
        )
        self.num_open[request_id] = 0
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Batches until every choice has ended."""
        while self._ready or any(count > 0 for count in self.num_open.values()):
            await self._wake.wait()
            self._wake.clear()
            batch, self._ready = self._ready, []
            if batch:
                yield batch
