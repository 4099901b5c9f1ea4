"""Scheduler: who runs in the next step, with which pages. It sees lengths and tokens, nothing else.

    schedule()     decoding sequences (one row each) and prefill chunks; admits and, if it must, preempts
    grant(...)     extra slots per decoding sequence out of pages that are truly free: never a preemption, a refusal
                   or an eviction
    settle(...)    after a step was read: registers full pages for reuse, returns surplus ones
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wingbeat.cache.prefix import PrefixCache
from wingbeat.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens start .. start+num_rows-1 of a sequence, to be forwarded."""

    sequence: Sequence
    start: int
    num_rows: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's sequences; the lanes of the `admitted` ones are to be opened."""

    decode: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]


class MustDrain(Exception):
    """Pages ran out while steps are unread: read them, then schedule again."""


class Scheduler:
    """Waiting and running sequences over a fixed number of lanes and one page pool."""

    def __init__(self, prefix: PrefixCache, *, num_lanes: int, max_rows: int) -> None:
        self.prefix = prefix
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_rows = max_rows
        self._lanes = list(range(num_lanes - 1, -1, -1))
        self._page_size = prefix.page_size

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, *, unread: bool) -> Schedule:
        """The next step. Raises MustDrain when it would have to preempt while steps are `unread`."""
        self._grow_decoding(unread=unread)
        decode = [s for s in self.running if not (s.is_prefilling or s.finished or s.surely_ends)]
        budget = max(self._max_rows - len(decode), 1)
        chunks, budget = self._continue_prefills(budget)
        admitted: list[Sequence] = []
        while budget > 0 and self._lanes and (sequence := self._admit()) is not None:
            admitted.append(sequence)
            chunk = self._chunk(sequence, budget)
            chunks.append(chunk)
            budget -= chunk.num_rows
        return Schedule(decode, chunks, admitted)

    def _continue_prefills(self, budget: int) -> tuple[list[Chunk], int]:
        chunks: list[Chunk] = []
        for sequence in self.running:
            if sequence.is_prefilling and not sequence.finished and budget > 0:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_rows
        return chunks, budget

    def _grow_decoding(self, *, unread: bool) -> None:
        """A slot for each decoding sequence's root; preempts the newest sequence when pages run out."""
        for sequence in sorted(self.running, key=lambda s: s.arrival):
            if sequence.is_prefilling or sequence.finished:
                continue
            while sequence.lane >= 0 and not self._cover(sequence, 1):
                if unread:
                    raise MustDrain
                self._preempt(max(self.running, key=lambda s: s.arrival))

    def _cover(self, sequence: Sequence, num_slots: int) -> bool:
        """Pages for `num_slots` tokens beyond the sequence's context bound; False when they are not available."""
        last = min(sequence.context_bound + num_slots, sequence.max_len)
        missing = -(-last // self._page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.prefix.pages.num_available:
            return False
        sequence.pages.extend(self.prefix.pages.reserve(missing))
        return True

    def grant(self, decode: list[Sequence], want: int) -> int:
        """Slots beyond the root that every decoding sequence has now, at most `want`; takes free pages only."""
        while want > 0:
            missing = 0
            for sequence in decode:
                last = min(sequence.context_bound + 1 + want, sequence.max_len)
                missing += max(-(-last // self._page_size) - len(sequence.pages), 0)
            if missing <= self.prefix.pages.num_free:
                break
            want -= 1
        if want > 0:
            for sequence in decode:
                self._cover(sequence, 1 + want)
        return want

    def _admit(self) -> Sequence | None:
        """Moves the head of the queue to a lane if the pages of all its known tokens (and one more) are there."""
        if not self.waiting or self._must_wait(self.waiting[0]):
            return None
        sequence = self.waiting[0]
        num_tokens = len(sequence.tokens)
        shared, keys = self.prefix.match(sequence.tokens)
        missing = -(-min(num_tokens + 1, sequence.max_len) // self._page_size) - len(shared)
        # Each running sequence wants its next page within page_size tokens: admitting into that page would only swap a
        # wait for a preemption.
        if missing + len(self.running) > self.prefix.pages.num_available:
            self.prefix.release(shared)
            return None
        self.waiting.popleft()
        self.prefix.count(num_tokens, len(shared))
        sequence.pages, sequence.page_keys = shared + self.prefix.pages.reserve(missing), keys
        sequence.lane = self._lanes.pop()
        sequence.prefill_len = num_tokens
        sequence.num_scheduled = sequence.context_len = len(shared) * self._page_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.context_len
        self.running.append(sequence)
        return sequence

    def _must_wait(self, sequence: Sequence) -> bool:
        """A further choice of a request waits for the first one's prompt, so that it finds the prefix in pages."""
        if sequence.choice_index == 0 or not self.prefix.enabled:
            return False
        return any(
            s.request.request_id == sequence.request.request_id and s.context_len < s.prompt_len for s in self.running
        )

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start = sequence.num_scheduled
        num_rows = min(sequence.prefill_len - start, budget)
        sequence.num_scheduled += num_rows
        return Chunk(sequence, start, num_rows, not sequence.is_prefilling)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens stay, its K/V is computed again (or found by prefix)."""
        self.remove(sequence)
        sequence.num_scheduled = sequence.context_len = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Makes full pages findable and, once nothing is unread, returns pages beyond the committed tokens."""
        size = self._page_size
        while (done := len(sequence.page_keys)) < sequence.context_len // size:
            previous = sequence.page_keys[-1] if done else None
            tokens = sequence.tokens[done * size : (done + 1) * size]
            sequence.page_keys.append(self.prefix.register(sequence.pages[done], previous, tokens))
        if sequence.num_unread == 0 and not sequence.is_prefilling:
            needed = -(-sequence.context_len // size)
            if len(sequence.pages) > needed:
                self.prefix.release(sequence.pages[needed:])
                del sequence.pages[needed:]
                sequence.num_table_pages = min(sequence.num_table_pages, needed)

    def remove(self, sequence: Sequence) -> None:
        """Takes a running or waiting sequence out and gives its lane and pages back."""
        if sequence.lane < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._lanes.append(sequence.lane)
        self.prefix.release(sequence.pages)
        sequence.lane, sequence.pages, sequence.page_keys, sequence.num_table_pages = -1, [], [], 0
