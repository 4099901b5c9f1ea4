"""PrefixCache: full pages found again by the tokens they hold.

A page's key chains over a salt and all tokens before it, so equal keys mean equal K/V. A page depends on its own and
earlier tokens only (never on the token after it), so a boot with and without a drafter has the same keys and hit rate.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

from wingbeat.cache.pages import PageAllocator

_ROOT = b"wingbeat"


class PrefixCache:
    """Reserves pages for a sequence, reusing those whose content is already there. Owns the allocator."""

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.pages = PageAllocator(num_pages, on_evict=self._forget)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def match(self, token_ids: Seq[int], salt: str | None = None) -> tuple[list[int], list[bytes]]:
        """Pages (now shared by the caller) of the longest known prefix under this salt, and their keys.

        At least one token is left to forward.
        """
        found: list[int] = []
        keys: list[bytes] = []
        if self.enabled:
            key = self.root(salt)
            for start in range(0, len(token_ids) - self.page_size, self.page_size):
                key = self.chain(key, token_ids[start : start + self.page_size])
                page = self._page_of.get(key)
                if page is None:
                    break
                found.append(page)
                keys.append(key)
        self.pages.share(found)
        return found, keys

    def count(self, num_tokens: int, num_pages: int) -> None:
        """Books one admission: of `num_tokens` known tokens, `num_pages` pages were found."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_pages * self.page_size

    @staticmethod
    def root(salt: str | None = None) -> bytes:
        """The key before a first page. Sequences share pages only under the same salt."""
        if salt is None:
            return _ROOT
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, key=_ROOT).digest()

    @staticmethod
    def chain(key: bytes, token_ids: Seq[int]) -> bytes:
        """Key of the page after the page with `key`."""
        return hashlib.blake2b(key + array("q", token_ids).tobytes(), digest_size=16).digest()

    def register(self, page: int, previous_key: bytes, token_ids: Seq[int]) -> bytes:
        """Makes a full, committed page findable; returns its key (the next page's `previous_key`; the first's is a
        root)."""
        key = self.chain(previous_key, token_ids)
        if self.enabled and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
        return key

    def release(self, pages: Seq[int]) -> None:
        """Gives pages back; those findable by prefix stay kept. Deepest first, so that chains shrink from the end."""
        self.pages.release(reversed(pages), keep=self._key_of.__contains__)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def clear(self) -> None:
        """Forgets every page nobody holds (used between benchmark arms)."""
        self.pages.drop_kept()
