"""Proof 5: pages balance under random reserve / commit / release / abort / preempt; prefix keys follow content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.cache.pages import PageAllocator
from wingbeat.cache.prefix import PrefixCache
from wingbeat.errors import EngineError

OPERATIONS = st.lists(st.tuples(st.sampled_from(["open", "grow", "settle", "close"]), st.integers(0, 50)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS, st.integers(1, 4), st.booleans())
def test_pages_balance(operations: list[tuple[str, int]], page_size: int, enabled: bool) -> None:
    prefix = PrefixCache(12, page_size, enabled=enabled)
    open_seqs: list[tuple[list[int], list[int], list[bytes]]] = []
    for name, number in operations:
        if name == "open":
            tokens = [number % 3] * (1 + number % 9)
            shared, keys = prefix.match(tokens)
            missing = -(-len(tokens) // page_size) - len(shared)
            if missing > prefix.pages.num_available:
                prefix.release(shared)
            else:
                open_seqs.append((tokens, shared + prefix.pages.reserve(missing), keys))
        elif open_seqs:
            tokens, pages, keys = open_seqs[number % len(open_seqs)]
            if name == "grow" and prefix.pages.num_available:
                pages.extend(prefix.pages.reserve(1))
                tokens.extend([number] * page_size)
            elif name == "settle":
                while len(keys) < len(tokens) // page_size:
                    done = len(keys)
                    chunk = tokens[done * page_size : (done + 1) * page_size]
                    keys.append(prefix.register(pages[done], keys[-1] if keys else prefix.root(), chunk))
            elif name == "close":
                prefix.release(pages)
                open_seqs.pop(number % len(open_seqs))
        prefix.pages.check()
    for _, pages, _ in open_seqs:
        prefix.release(pages)
    prefix.pages.check()
    assert prefix.pages.num_held == 0
    prefix.clear()
    assert prefix.pages.num_free == 12


def test_prefix_hit_leaves_one_token_and_shares_pages() -> None:
    prefix = PrefixCache(8, 4)
    tokens = list(range(12))
    pages = prefix.pages.reserve(3)
    keys: list[bytes] = []
    for i in range(3):
        keys.append(prefix.register(pages[i], keys[-1] if keys else prefix.root(), tokens[4 * i : 4 * i + 4]))
    assert prefix.match(tokens)[0] == pages[:2]  # 12 tokens: the last page must be left to forward
    assert prefix.match([*tokens, 99]) == (pages, keys)
    assert prefix.match([7, *tokens])[0] == []
    prefix.release(pages)
    assert prefix.pages.num_held == 3  # two matches still hold them


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31), min_size=4, max_size=12), st.data())
def test_any_other_token_is_another_page(tokens: list[int], data: st.DataObject) -> None:
    """Every token of a page, and every page before it, is part of its key; nothing behind it is."""
    prefix, full = PrefixCache(8, 4), len(tokens) // 4
    key = prefix.root()
    for i, page in enumerate(prefix.pages.reserve(full)):
        key = prefix.register(page, key, tokens[4 * i : 4 * i + 4])
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    assert len(prefix.match([*tokens, 0])[0]) == full
    assert len(prefix.match([*other, 0])[0]) == min(place // 4, full)


def test_salts_share_nothing() -> None:
    prefix, tokens = PrefixCache(8, 4), [1, 2, 3, 4, 5]
    salts = (None, "a", "b", "\ud800")
    pages = prefix.pages.reserve(len(salts))
    for page, salt in zip(pages, salts, strict=True):
        assert prefix.match(tokens, salt) == ([], [])
        key = prefix.register(page, prefix.root(salt), tokens[:4])
        assert prefix.match(tokens, salt) == ([page], [key])


def test_kept_pages_are_given_up_oldest_first_and_forgotten() -> None:
    prefix = PrefixCache(2, 2)
    pages = prefix.pages.reserve(2)
    first = prefix.register(pages[0], prefix.root(), [1, 2])
    prefix.register(pages[1], first, [3, 4])
    prefix.release(pages)
    assert prefix.pages.num_free == 0 and prefix.pages.num_available == 2
    prefix.pages.reserve(1)  # takes the deeper page
    assert len(prefix.match([1, 2, 3, 4, 5])[0]) == 1


def test_errors_are_loud() -> None:
    pages = PageAllocator(2)
    taken = pages.reserve(2)
    with pytest.raises(EngineError, match="exhausted"):
        pages.reserve(1)
    pages.release(taken)
    with pytest.raises(EngineError, match="more often"):
        pages.release(taken)
