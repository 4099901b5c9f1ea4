"""The scheduler on its own: admission, growth, grants, preemption, settling - and a page balance under any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import byte_tokenizer

from wingbeat.cache.prefix import PrefixCache
from wingbeat.engine.scheduler import MustDrain, Schedule, Scheduler
from wingbeat.engine.sequence import Sequence
from wingbeat.text.detokenize import Detokenizer
from wingbeat.types import Request, SamplingParams

PAGE = 4


def make(num_pages: int = 8, num_lanes: int = 4, max_rows: int = 64, *, prefix: bool = True) -> Scheduler:
    return Scheduler(PrefixCache(num_pages, PAGE, enabled=prefix), num_lanes=num_lanes, max_rows=max_rows)


def sequence(
    tokens: list[int],
    arrival: int = 0,
    *,
    max_len: int = 32,
    choice: int = 0,
    name: str = "",
    salt: str | None = None,
) -> Sequence:
    params, name = SamplingParams(n=choice + 1), name or f"r{arrival}"
    request = Request(request_id=name, prompt_token_ids=tuple(tokens), params=params, cache_salt=salt)
    return Sequence(
        request=request,
        choice_index=choice,
        seed=0,
        arrival=arrival,
        max_len=max_len,
        detokenizer=Detokenizer(byte_tokenizer(), params),
        tokens=list(tokens),
    )


def distinct(num_tokens: int, arrival: int) -> list[int]:
    """Tokens that share no page with another arrival's."""
    return [100 * arrival + i for i in range(num_tokens)]


def run_step(scheduler: Scheduler, schedule: Schedule, new_tokens: int = 1) -> None:
    """What a step and its digest do to the sequences: rows committed, tokens known, pages settled."""
    for each in schedule.decode:
        each.tokens.extend([9] * new_tokens)
        each.context_len = len(each.tokens) - 1
    for chunk in schedule.chunks:
        chunk.sequence.context_len += chunk.num_rows
        if chunk.samples:
            chunk.sequence.tokens.append(9)
    for each in scheduler.running:
        scheduler.settle(each)


def admitted(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Prefilled and ready to decode."""
    for each in sequences:
        scheduler.add(each)
    schedule = scheduler.schedule(unread=False)
    assert schedule.admitted == list(sequences)
    run_step(scheduler, schedule)


def test_a_sequence_is_admitted_when_its_pages_and_one_more_token_fit() -> None:
    scheduler = make(num_pages=3)
    scheduler.add(sequence(distinct(12, 0)))
    assert scheduler.schedule(unread=False).admitted == []  # 12 tokens and one to come: 4 pages
    scheduler = make(num_pages=3)
    scheduler.add(sequence(distinct(11, 0)))
    assert len(scheduler.schedule(unread=False).admitted) == 1
    assert scheduler.prefix.pages.num_free == 0


def test_each_running_sequence_keeps_a_page_to_grow_into() -> None:
    scheduler = make(num_pages=4)
    admitted(scheduler, sequence(distinct(3, 0), 0), sequence(distinct(3, 1), 1))
    scheduler.add(sequence(distinct(3, 2), 2))
    assert scheduler.schedule(unread=False).admitted == []  # 2 pages are left, the two that run want them
    scheduler.remove(scheduler.running[0])
    assert len(scheduler.schedule(unread=False).admitted) == 1


def test_the_queue_is_served_in_order() -> None:
    scheduler = make(num_pages=4)
    admitted(scheduler, sequence(distinct(3, 0), 0))
    large, small = sequence(distinct(15, 1), 1), sequence(distinct(3, 2), 2)
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.schedule(unread=False).admitted == []  # nobody overtakes
    assert list(scheduler.waiting) == [large, small]


def test_no_more_sequences_than_lanes_and_lanes_come_back() -> None:
    scheduler = make(num_pages=32, num_lanes=2)
    first, second, third = (sequence(distinct(2, i), i) for i in range(3))
    for each in (first, second, third):
        scheduler.add(each)
    assert scheduler.schedule(unread=False).admitted == [first, second]
    assert sorted([first.lane, second.lane]) == [0, 1]
    lane = first.lane
    scheduler.remove(first)
    assert (first.lane, first.pages) == (-1, [])
    assert scheduler.schedule(unread=False).admitted == [third]
    assert third.lane == lane


def test_long_prompts_are_cut_and_decoding_rows_count() -> None:
    scheduler = make(num_pages=32, max_rows=10)
    admitted(scheduler, sequence(distinct(2, 0), 0))
    prompt = sequence(distinct(25, 1), 1)
    scheduler.add(prompt)
    sizes = []
    while not sizes or prompt.is_prefilling:
        schedule = scheduler.schedule(unread=False)
        assert len(schedule.decode) == 1
        sizes += [(chunk.start, chunk.num_rows, chunk.samples) for chunk in schedule.chunks]
        run_step(scheduler, schedule)
    assert sizes == [(0, 9, False), (9, 9, False), (18, 7, True)]


def test_a_grant_takes_free_pages_only() -> None:
    scheduler = make(num_pages=6)
    leaver = sequence(distinct(8, 1), 1)
    admitted(scheduler, sequence(distinct(4, 0), 0), leaver)
    scheduler.remove(leaver)
    pages = scheduler.prefix.pages
    assert (pages.num_free, pages.num_available) == (3, 5)  # two pages of the leaver can be found by prefix
    decode = scheduler.schedule(unread=False).decode
    assert pages.num_free == 2  # the root took one
    assert scheduler.grant(decode, 16) == 3 + 8  # the rest of the root's page and two more
    assert (pages.num_free, pages.num_available) == (0, 2)
    assert scheduler.num_preemptions == 0


def test_a_grant_is_the_same_for_all_and_stops_at_the_end_of_a_sequence() -> None:
    scheduler = make(num_pages=5)
    admitted(scheduler, sequence(distinct(4, 0), 0), sequence(distinct(2, 1), 1, max_len=4))
    decode = scheduler.schedule(unread=False).decode
    assert scheduler.prefix.pages.num_free == 2
    assert scheduler.grant(decode, 16) == 3 + 8  # both free pages go to the first: the second ends within its page
    assert [len(each.pages) for each in decode] == [4, 1]
    assert scheduler.grant([], 3) == 3


def test_without_a_free_page_nothing_beyond_the_page_at_hand_is_granted() -> None:
    scheduler = make(num_pages=2)
    admitted(scheduler, sequence(distinct(5, 0), 0))
    decode = scheduler.schedule(unread=False).decode
    assert scheduler.prefix.pages.num_available == 0
    assert scheduler.grant(decode, 8) == 2  # slots 6 and 7 of the second page


def test_the_newest_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    scheduler = make(num_pages=4)
    old, new = sequence(distinct(3, 0), 0), sequence(distinct(7, 1), 1)
    admitted(scheduler, old, new)
    waiting = sequence(distinct(9, 2), 2)
    scheduler.add(waiting)
    for _ in range(8):
        schedule = scheduler.schedule(unread=False)
        if new.lane < 0:
            break
        run_step(scheduler, schedule)
    assert scheduler.running == [old] and list(scheduler.waiting) == [new, waiting]
    assert (scheduler.num_preemptions, new.num_preemptions) == (1, 1)
    assert (new.num_scheduled, new.context_len, new.pages, new.num_table_pages) == (0, 0, [], 0)
    assert len(new.tokens) > 7, "its tokens stay"
    assert schedule.decode == [old]


def test_nobody_is_preempted_while_steps_are_unread() -> None:
    scheduler = make(num_pages=2)
    admitted(scheduler, sequence(distinct(7, 0), 0))
    run_step(scheduler, scheduler.schedule(unread=True))
    with pytest.raises(MustDrain):
        scheduler.schedule(unread=True)
    assert scheduler.num_preemptions == 0 and len(scheduler.running) == 1


def test_a_sequence_that_surely_ends_takes_no_more_pages() -> None:
    scheduler = make(num_pages=2)
    one = sequence(distinct(7, 0), 0, max_len=9)
    admitted(scheduler, one)
    assert len(one.tokens) == 8 and len(one.pages) == 2
    scheduler.schedule(unread=False)
    one.note_handed_over(1)
    assert scheduler.schedule(unread=True).decode == []


def unread_surplus(spare: int) -> tuple[Scheduler, Sequence, Schedule]:
    """One sequence of one page with a step under way that was granted 8 slots, in a pool of 4 pages (spare besides)."""
    scheduler = Scheduler(PrefixCache(4 + spare, PAGE), num_lanes=4, max_rows=64, spare=spare)
    one = sequence(distinct(2, 0), 0)
    admitted(scheduler, one)
    schedule = scheduler.schedule(unread=False)
    assert scheduler.grant(schedule.decode, 8) == 8
    assert len(one.pages) == 3
    one.note_handed_over(9)
    return scheduler, one, schedule


def test_surplus_of_an_unread_step_comes_back_before_anybody_waits() -> None:
    """Without it three pages are there: two for 7 tokens and one to come, and one that the first may grow into."""
    scheduler, one, schedule = unread_surplus(spare=0)
    other = sequence(distinct(7, 1), 1)
    scheduler.add(other)
    with pytest.raises(MustDrain):
        scheduler.schedule(unread=True)
    assert scheduler.waiting[0] is other and one.lane >= 0
    one.note_read(9)
    run_step(scheduler, schedule)
    assert scheduler.schedule(unread=False).admitted == [other]


@pytest.mark.parametrize(("num_tokens", "spare"), [(3, 0), (7, 4)])
def test_nothing_has_to_be_read_where_the_pages_are_there(num_tokens: int, spare: int) -> None:
    scheduler, _, _ = unread_surplus(spare)
    other = sequence(distinct(num_tokens, 1), 1)
    scheduler.add(other)
    assert scheduler.schedule(unread=True).admitted == [other]


def test_spare_pages_admit_nobody() -> None:
    scheduler = Scheduler(PrefixCache(3 + 8, PAGE), num_lanes=4, max_rows=64, spare=8)
    scheduler.add(sequence(distinct(12, 0)))
    assert scheduler.schedule(unread=False).admitted == []
    scheduler.waiting[0].tokens.pop()
    assert len(scheduler.schedule(unread=False).admitted) == 1


def test_settling_makes_full_pages_findable_and_returns_the_surplus() -> None:
    scheduler = make(num_pages=8)
    one = sequence(distinct(6, 0), 0)
    admitted(scheduler, one)
    assert scheduler.grant(scheduler.schedule(unread=False).decode, 16) == 16
    one.num_table_pages = len(one.pages)
    assert len(one.pages) == 6
    one.num_unread = 1
    scheduler.settle(one)
    assert len(one.pages) == 6, "an unread step may still write there"
    one.num_unread = 0
    scheduler.settle(one)
    assert (len(one.pages), one.num_table_pages, len(one.page_keys)) == (2, 2, 1)
    assert scheduler.prefix.pages.num_free == 6
    twin = sequence(distinct(6, 0), 1)
    scheduler.add(twin)
    scheduler.schedule(unread=False)
    assert twin.pages[0] == one.pages[0] and twin.pages[1] != one.pages[1]
    assert (twin.context_len, twin.num_cached_tokens) == (4, 4)


def test_further_choices_wait_for_the_first_ones_prompt() -> None:
    scheduler = make(num_pages=16, max_rows=6)
    first, second = (sequence(distinct(9, 0), i, choice=i, name="r") for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    admissions = []
    for _ in range(3):
        schedule = scheduler.schedule(unread=False)
        admissions.append(schedule.admitted)
        run_step(scheduler, schedule)
    assert admissions == [[first], [], [second]]
    assert second.num_cached_tokens == 8


def test_a_prompt_is_found_again_under_its_own_salt_only() -> None:
    scheduler = make(num_pages=16, num_lanes=5)
    for salt in (None, "a"):
        admitted(scheduler, sequence(distinct(9, 0), salt=salt))
    later = [sequence(distinct(9, 0), 1, salt=salt) for salt in ("b", "a", None)]
    for each in later:
        scheduler.add(each)
    assert scheduler.schedule(unread=False).admitted == later
    assert [each.num_cached_tokens for each in later] == [0, 8, 8]


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "step", "grant", "abort"]), st.integers(0, 10**6), st.integers(0, 5)),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(3, 12), st.booleans())
def test_pages_and_lanes_balance_in_any_order(steps: list[tuple[str, int, int]], num_pages: int, prefix: bool) -> None:
    """Proof 5 one level up: whatever comes when, every page is one of free, kept or held, and all come back."""
    scheduler, arrivals = make(num_pages, num_lanes=3, max_rows=7, prefix=prefix), count()
    longest = (num_pages - 1) * PAGE
    for name, number, size in steps:
        pages = scheduler.prefix.pages
        if name == "add":
            base = [number % 2] * (number % 3 * PAGE)
            scheduler.add(sequence(([*base, *range(size + 1)])[: longest - 1], next(arrivals), max_len=longest))
        elif name == "abort" and (everyone := [*scheduler.running, *scheduler.waiting]):
            scheduler.remove(everyone[number % len(everyone)])
        elif name in ("step", "grant"):
            schedule = scheduler.schedule(unread=False)
            before = (scheduler.num_preemptions, pages.num_available - pages.num_free)
            granted = scheduler.grant(schedule.decode, size) if name == "grant" else 0
            assert before == (scheduler.num_preemptions, pages.num_available - pages.num_free)
            assert granted <= size
            for each in schedule.decode:
                last = min(len(each.tokens) + granted, each.max_len)
                assert len(each.pages) * PAGE >= last, "every slot the step may write is there"
            run_step(scheduler, schedule, 1 + number % (granted + 1))
            for each in [s for s in scheduler.running if len(s.tokens) >= s.max_len]:
                scheduler.remove(each)
        pages.check()
        held = [page for each in scheduler.running for page in each.pages]
        assert set(held) == {page for page in range(num_pages) if pages._holders[page]}
        lanes = [each.lane for each in scheduler.running]
        assert sorted(lanes + scheduler._lanes) == [0, 1, 2]
    for each in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(each)
    assert scheduler.prefix.pages.num_held == 0 and not scheduler.has_work


@dataclass
class Entry:
    """What one call of schedule() decided."""

    drained: bool = False
    evicted: int = 0
    preempted: int = 0
    decode: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


class Driven:
    """A scheduler with a loop around it in which every sequence gets one token per step, whatever was granted."""

    def __init__(self, num_pages: int, *, spare: int, want: int, overlapped: bool) -> None:
        prefix = PrefixCache(num_pages + spare, PAGE)
        self.scheduler = Scheduler(prefix, num_lanes=3, max_rows=7, spare=spare)
        self.trace: list[Entry] = []
        self.granted = 0
        self.arrivals = count()
        self._want, self._overlapped = want, overlapped
        self._unread: list[tuple[Schedule, list[int]]] = []
        give_up = prefix.pages._give_up_oldest

        def noted() -> None:
            self.trace[-1].evicted += 1
            give_up()

        reserve = prefix.pages.reserve

        def reserved(pages: int) -> list[int]:
            assert pages <= prefix.pages.num_free, "evicted for pages that others hold as surplus"
            return reserve(pages)

        prefix.pages._give_up_oldest = noted  # type: ignore[method-assign]
        prefix.pages.reserve = reserved  # type: ignore[method-assign]

    def add(self, number: int, size: int, longest: int) -> None:
        base = [number % 2] * (number % 3 * PAGE)
        tokens = [*base, *range(size + 1)][: longest - 1]
        max_len = min(longest, len(tokens) + 1 + number % 11)
        self.scheduler.add(sequence(tokens, next(self.arrivals), max_len=max_len))

    def step(self) -> None:
        entry = Entry()
        self.trace.append(entry)
        try:
            schedule = self.scheduler.schedule(unread=bool(self._unread))
        except MustDrain:
            entry.drained = True
            self.read()
            return
        entry.preempted = self.scheduler.num_preemptions
        entry.decode = [s.arrival for s in schedule.decode]
        entry.chunks = [(c.sequence.arrival, c.start, c.num_rows) for c in schedule.chunks]
        entry.admitted = [s.arrival for s in schedule.admitted]
        granted = self.scheduler.grant(schedule.decode, self._want)
        self.granted += granted if schedule.decode else 0
        everyone = [*schedule.decode, *(chunk.sequence for chunk in schedule.chunks)]
        room = [s.max_len - len(s.tokens) - s.num_unread - 1 for s in schedule.decode]
        bounds = [1 + max(min(granted, left), 0) for left in room] + [int(chunk.samples) for chunk in schedule.chunks]
        for each, bound in zip(everyone, bounds, strict=True):
            each.note_handed_over(bound)
            assert len(each.pages) * PAGE >= each.context_bound, "every slot the step may write is there"
        if self._overlapped:
            self.read()
        self._unread.append((schedule, bounds))
        if not self._overlapped:
            self.read()

    def read(self) -> None:
        for schedule, bounds in self._unread:
            rows = [(s, 1) for s in schedule.decode] + [(c.sequence, c.num_rows) for c in schedule.chunks]
            for (each, num_rows), bound in zip(rows, bounds, strict=True):
                each.note_read(bound)
                if not each.finished:
                    each.context_len += num_rows
                    each.tokens.extend([9] * (bound > 0))
                    each.finished = len(each.tokens) >= each.max_len
                    self.scheduler.settle(each)
                if each.finished and each.num_unread_steps == 0:
                    self.scheduler.remove(each)
        self._unread.clear()


@pytest.mark.parametrize("overlapped", [False, True])
def test_slots_that_come_to_nothing_change_nothing(overlapped: bool) -> None:
    """Who runs, is admitted, preempted, evicted, and when: as in a pool without spare pages and without grants."""
    evictions = calm_loads = 0
    for seed in range(400):
        source = random.Random(seed)
        num_pages, want = source.randint(4, 14), source.randint(1, 8)
        spare = 3 * -(-2 * want // PAGE)
        plain = Driven(num_pages, spare=0, want=0, overlapped=overlapped)
        granted = Driven(num_pages, spare=spare, want=want, overlapped=overlapped)
        for _ in range(100):
            number, size = source.randrange(10**6), source.randint(0, 9)
            for driven in (plain, granted):
                if number % 5 == 0:
                    driven.add(number, size, (num_pages - 1) * PAGE)
                driven.step()
        # Up to the first shortage: a page taken early for a slot can save the later preemption.
        calm = list(takewhile(lambda entry: entry.preempted == 0 and not entry.drained, plain.trace))
        assert granted.trace[: len(calm)] == calm, f"seed {seed}"
        evictions += sum(entry.evicted for entry in calm)
        if calm == plain.trace:
            calm_loads += 1
            assert granted.granted == want * sum(bool(entry.decode) for entry in calm), "spare pages suffice"
    assert evictions > 100 and calm_loads > 20, "the pools must be small, and not all too small"


def test_too_few_spare_pages_cost_a_wait_for_the_unread_step_and_nothing_else() -> None:
    drained = granted = 0
    for seed in range(400):
        source = random.Random(seed)
        num_pages, want = source.randint(4, 20), source.randint(4, 12)
        driven = Driven(num_pages, spare=source.randint(0, 2), want=want, overlapped=True)
        for _ in range(100):
            if source.random() < 0.2:
                driven.add(source.randrange(10**6), source.randint(0, 9), (num_pages - 1) * PAGE)
            driven.step()
        while driven.scheduler.has_work:
            driven.step()
        driven.scheduler.prefix.pages.check()
        assert driven.scheduler.prefix.pages.num_held == 0
        drained += sum(entry.drained for entry in driven.trace)
        granted += driven.granted
    assert drained > 100 and granted > 1000
