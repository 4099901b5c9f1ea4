"""Detokenizer: the text of one choice as its tokens arrive, whole characters only, cut at the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What some tokens added to a choice."""

    text: str
    """Text that is now certain to be part of the answer."""
    stop: str | None
    """The stop string that ended the choice."""
    num_tokens_kept: int
    """How many of the tokens belong to the choice: all, or those up to the end of the stop string."""


class Detokenizer:
    """Joins tokens on the level of bytes, so a character may span tokens and each token is decoded once.

    Stop strings are looked for after every single token, so where a choice ends does not depend on how its tokens
    were batched. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._silent = _silent_ids(tokenizer, params)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._num_barred = 0
        """Characters at the start of the held text in which no stop may end (text of the first min_tokens tokens)."""
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> TextUpdate:
        """The text these tokens add; `stop` is set once, and then nothing more may be appended."""
        if not self._stops:
            return TextUpdate(self._decoder.decode(b"".join(map(self._bytes, token_ids))), None, len(token_ids))
        released: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._take(token_id)
            found = self._first_stop()
            if found is not None:
                start, stop = found
                text = self._held[: start + len(stop) * self._include_stop]
                self._held = ""
                return TextUpdate("".join([*released, text]), stop, count)
            released.append(self._release())
        return TextUpdate("".join(released), None, len(token_ids))

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for a character that never became whole."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return rest

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent else self._tokenizer.token_bytes(token_id)

    def _take(self, token_id: int) -> None:
        self._held += self._decoder.decode(self._bytes(token_id))
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._num_barred = len(self._held)

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the first stop string begins in the held text, and which it is."""
        found: tuple[int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(self._num_barred - len(stop) + 1, 0))
            if start >= 0 and (found is None or start < found[0]):
                found = (start, stop)
        return found

    def _release(self) -> str:
        """Moves out the text in which no stop string can begin any more."""
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._num_barred = max(self._num_barred - cut, 0)
        return text


def _silent_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Tokens that give no text: special ones if asked for, and those that end the choice (as in vLLM)."""
    silent: set[int] = set(tokenizer.special_ids) if params.skip_special_tokens else set()
    if not params.include_stop_str_in_output:
        silent.update(params.stop_token_ids)
        silent.update(() if params.ignore_eos else tokenizer.eos_token_ids)
    return frozenset(silent)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins, but is not all of, `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
