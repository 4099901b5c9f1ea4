"""Grammars: JSON schemas compiled to masks over the vocabulary, for every row a speculative step samples.

The library (llguidance) is imported when the first constrained request arrives.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import RequestError
from wingbeat.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 64
MAX_SCHEMA_CHARS = 200_000
# Any whitespace would do for JSON, but a small model can fill its whole answer with it.
OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"(\n[ ]{0,16}|[ ]{0,2})"}


class GrammarCompiler:
    """Compiles schemas for one tokenizer; the last ones are kept. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._cache_lock, self._backend_lock = Lock(), Lock()

    def prepare(self) -> None:
        """Reads the vocabulary, which the first schema would otherwise wait for: 0.2 s that hold the interpreter's
        lock, so that no other thread would run either."""
        if self._tokenizer.eos_token_ids:
            self._library_tokenizer()

    def compile(self, json_schema: str) -> Grammar:
        """The grammar of a JSON schema ('{}' is any JSON object). RequestError naming what is not supported.

        A new schema takes a few milliseconds, in which other threads run; one of the last 64 takes none.
        """
        with self._cache_lock:
            found = self._compiled.pop(json_schema, None)
        found = found or self._compile(json_schema)
        with self._cache_lock:
            self._compiled[json_schema] = found
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, json_schema: str) -> Grammar:
        from llguidance import LLMatcher

        start = LLMatcher(self._library_tokenizer(), _grammar_text(json_schema))
        if start.is_error():
            raise _refusal(json_schema, start.get_error())
        return Grammar(start, self._tokenizer)

    def _library_tokenizer(self) -> LLTokenizer:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._read_vocabulary()
            return self._backend

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        eos = list(self._tokenizer.eos_token_ids)
        if not eos:
            raise RequestError(
                "response_format", "json_schema", "only a model with an end-of-sequence token can be constrained"
            )
        return LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._tokenizer.vocab_size, eos_token=eos)


class Grammar:
    """A compiled schema; gives a fresh matcher per choice."""

    def __init__(self, start: LLMatcher, tokenizer: Tokenizer) -> None:
        self._start, self._tokenizer = start, tokenizer

    def matcher(self) -> Matcher:
        return Matcher(self._start.deep_copy(), self._tokenizer.vocab_size, self._tokenizer.eos_token_ids)


class Matcher:
    """Where one choice stands in its grammar: at its committed tokens."""

    def __init__(self, state: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._state, self._eos_ids = state, frozenset(eos_ids)
        self._num_words = -(-vocab_size // 32)
        self._only_eos = _mask_of(eos_ids, self._num_words)
        self._ended = False

    def advance(self, token_ids: Sequence[int]) -> None:
        """Commits tokens. The end token ends the grammar, and so does a token that it does not allow."""
        for token_id in token_ids:
            if self._ended:
                return
            self._ended = token_id in self._eos_ids or self._state.try_consume_tokens([token_id]) == 0

    def bitmasks(self, paths: Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """Allowed next tokens after the committed ones plus each path: bit i of word w is token 32 w + i.

        The end token is allowed exactly where the text may end; it is all that is allowed after a path that broke the
        grammar (no such row can be committed) or that ended. -> [len(paths), ceil(V/32)] int32
        """
        masks = np.empty((len(paths), self._num_words), np.int32)
        for row, path in enumerate(paths):
            masks[row] = self._mask_after(path)
        return masks

    def is_complete(self) -> bool:
        """True when the committed text satisfies the grammar."""
        return self._state.is_accepting()

    def _mask_after(self, path: Sequence[int]) -> NDArray[np.int32]:
        if self._ended or not self._eos_ids.isdisjoint(path):
            return self._only_eos
        taken = self._state.try_consume_tokens(list(path)) if path else 0
        mask = self._only_eos if taken < len(path) else self._next_tokens()
        if taken:
            self._state.rollback(taken)
        return mask

    def _next_tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self._state.compute_bitmask(), np.int32)[: self._num_words]


def _mask_of(token_ids: Sequence[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _grammar_text(json_schema: str) -> str:
    from llguidance import LLMatcher

    if len(json_schema) > MAX_SCHEMA_CHARS:
        raise RequestError(
            "response_format", f"a schema of {len(json_schema)} characters", f"at most {MAX_SCHEMA_CHARS} characters"
        )
    try:
        schema: object = json.loads(json_schema)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema or {"type": "object"}), overrides=OPTIONS)
    except (ValueError, RecursionError) as error:
        raise _refusal(json_schema, str(error)) from None
    return grammar


def _refusal(json_schema: str, reason: str) -> RequestError:
    shown = json_schema if len(json_schema) <= 200 else json_schema[:200] + "..."
    return RequestError("response_format", shown, f"a JSON schema that llguidance supports: {reason.strip()}")
