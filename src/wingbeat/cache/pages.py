"""PageAllocator: which page belongs to whom. One page table serves the pools of target and drafter alike.

A page is free, held (by one or more sequences) or kept: nobody holds it, but its contents can be reused by prefix and
it is given up, oldest first, when free pages run out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from wingbeat.errors import EngineError


class PageAllocator:
    """Hands out page ids 0..num_pages-1 with reference counts."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        """`on_evict(page)` is told when a kept page is given up, so that the prefix index forgets it."""
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Pages that can be taken without giving up any kept one."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free and kept pages together."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def reserve(self, count: int) -> list[int]:
        """`count` pages with one holder each. Raises EngineError when fewer are available (check first)."""
        if count > self.num_available:
            raise EngineError(f"page pool exhausted: {count} pages wanted, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if not self._free:
            self._give_up_oldest()
        page = self._free.popleft()
        self._holders[page] = 1
        return page

    def _give_up_oldest(self) -> None:
        page, _ = self._kept.popitem(last=False)
        if self._on_evict is not None:
            self._on_evict(page)
        self._free.append(page)

    def give_up(self, count: int) -> None:
        """Frees the `count` oldest kept pages, or all of them if they are fewer."""
        for _ in range(min(count, len(self._kept))):
            self._give_up_oldest()

    def drop_kept(self) -> None:
        """Gives up every kept page."""
        self.give_up(len(self._kept))

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page (a prefix hit)."""
        for page in pages:
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int], keep: Callable[[int], bool] = lambda page: False) -> None:
        """One holder less for each page; a page nobody holds is kept if `keep(page)`, else free again."""
        for page in pages:
            if self._holders[page] <= 0:
                raise EngineError(f"page {page} released more often than held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if keep(page):
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def check(self) -> None:
        """Raises EngineError unless every page is exactly one of free, kept, held."""
        free, kept = set(self._free), set(self._kept)
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        if len(free) != len(self._free) or free | kept | held != set(range(self.num_pages)):
            raise EngineError("a page was lost or freed twice")
        if free & kept or free & held or kept & held:
            raise EngineError("a page is in two states")
