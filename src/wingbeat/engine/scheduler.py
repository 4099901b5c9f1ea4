"""Scheduler: who runs in the next step, with which pages. It sees lengths and tokens, nothing else.

schedule()     decoding sequences (one row each) and prefill chunks; admits and, if it must, preempts
grant(...)     extra slots per decoding sequence out of pages that are truly free: never a preemption, a refusal
               or an eviction
settle(...)    after a step was read: registers full pages for reuse, returns surplus ones

A sequence owes its pages to the tokens it surely has; those for tokens it may get beyond them are surplus. Admission,
eviction and preemption go by owed pages alone, as if surplus ones did not exist: the pool has `spare` pages more than
requests are admitted into, and surplus comes out of those first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

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
    """Waiting and running sequences over a fixed number of lanes and one page pool, `spare` pages of it included."""

    def __init__(self, prefix: PrefixCache, *, num_lanes: int, max_rows: int, spare: int = 0) -> None:
        self.prefix = prefix
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_rows = max_rows
        self._lanes = list(range(num_lanes - 1, -1, -1))
        self._page_size = prefix.page_size
        self._spare = spare
        self._surplus = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, *, unread: bool) -> Schedule:
        """The next step. Raises MustDrain where pages of `unread` steps could come back and change what is decided."""
        self._surplus = sum(max(len(s.pages) - self._owed(s), 0) for s in self.running)
        if unread and self._surplus_is_in_the_way():
            raise MustDrain
        self._free_owed(0)  # surplus pages that have become owed count from here on
        self._grow_decoding(unread=unread)
        decode = [s for s in self.running if self._grows(s)]
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
            while sequence.lane >= 0 and self._grows(sequence) and not self._cover(sequence):
                if unread:
                    raise MustDrain
                self._preempt(max(self.running, key=lambda s: s.arrival))

    def _cover(self, sequence: Sequence) -> bool:
        """Pages for the sequence's root wherever unread steps may put it; False when they are not available."""
        owed = self._owed(sequence) - len(sequence.pages)
        if owed > 0:
            if not self._can_take(owed):
                return False
            sequence.pages.extend(self._take(owed))
        extra = self._missing(sequence, 1)
        if extra > self.prefix.pages.num_free:
            return False
        self._take_surplus(sequence, extra)
        return True

    def _surplus_is_in_the_way(self) -> bool:
        """Unread steps hold surplus beyond the spare pages, and what this step might take is not free without it."""
        growing = [s for s in self.running if self._grows(s)]
        owed = sum(max(self._owed(s) - len(s.pages), 0) for s in growing)
        growth = sum(self._missing(s, 1) for s in growing)
        if self._surplus + growth - owed <= self._spare:
            return False
        waiting = islice(self.waiting, len(self._lanes))
        admissions = sum(self._pages_for(s, len(s.tokens) + 1) for s in waiting)
        return growth + admissions > self.prefix.pages.num_free

    @staticmethod
    def _grows(sequence: Sequence) -> bool:
        """It has a root in the next step."""
        return not (sequence.is_prefilling or sequence.finished or sequence.surely_ends)

    def _owed(self, sequence: Sequence) -> int:
        """Pages for the tokens it surely has once unread steps are done; a prompt's were reserved at admission."""
        known = max(len(sequence.tokens) + sequence.num_unread_sure, sequence.prefill_len + 1)
        return self._pages_for(sequence, known)

    def _missing(self, sequence: Sequence, num_slots: int) -> int:
        """Pages it lacks for `num_slots` tokens beyond its context bound."""
        return max(self._pages_for(sequence, sequence.context_bound + num_slots) - len(sequence.pages), 0)

    def _pages_for(self, sequence: Sequence, num_tokens: int) -> int:
        """The token at max_len is never forwarded, so it needs no slot."""
        return -(-min(num_tokens, sequence.max_len - 1) // self._page_size)

    def _can_take(self, count: int) -> bool:
        """Whether `count` owed pages are available, free or kept, as if surplus and spare pages did not exist."""
        return count <= self.prefix.pages.num_available + self._surplus - self._spare

    def _take(self, count: int) -> list[int]:
        self._free_owed(count)
        return self.prefix.pages.reserve(count)

    def _free_owed(self, count: int) -> None:
        """Gives up kept pages until `count` owed ones are free, as if surplus and spare pages did not exist."""
        pages = self.prefix.pages
        pages.give_up(count - (pages.num_free + self._surplus - self._spare))

    def _take_surplus(self, sequence: Sequence, count: int) -> None:
        sequence.pages.extend(self.prefix.pages.reserve(count))
        self._surplus += count

    def grant(self, decode: list[Sequence], want: int) -> int:
        """Slots beyond the root that every decoding sequence has now, at most `want`; takes free pages only."""
        while want > 0 and sum(self._missing(s, 1 + want) for s in decode) > self.prefix.pages.num_free:
            want -= 1
        for sequence in decode if want > 0 else ():
            self._take_surplus(sequence, self._missing(sequence, 1 + want))
        return want

    def _admit(self) -> Sequence | None:
        """Moves the head of the queue to a lane if the pages of all its known tokens (and one more) are there."""
        if not self.waiting or self._must_wait(self.waiting[0]):
            return None
        sequence = self.waiting[0]
        num_tokens = len(sequence.tokens)
        shared, keys = self.prefix.match(sequence.tokens, sequence.request.cache_salt)
        missing = self._pages_for(sequence, num_tokens + 1) - len(shared)
        # Each running sequence wants its next page within page_size tokens: admitting into that page would only swap a
        # wait for a preemption.
        if not self._can_take(missing + len(self.running)):
            self.prefix.release(shared)
            return None
        self.waiting.popleft()
        self.prefix.count(num_tokens, len(shared))
        sequence.pages, sequence.page_keys = shared + self._take(missing), keys
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
            previous = sequence.page_keys[-1] if done else self.prefix.root(sequence.request.cache_salt)
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
