"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import TokenLogprob

JsonObject = dict[str, object]
LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> JsonObject:
    """{"content": [{token, logprob, bytes, top_logprobs}]}."""
    content = [
        _entry(tokenizer, item.token_id, item.logprob)
        | {"top_logprobs": [_entry(tokenizer, token_id, value) for token_id, value in item.top]}
        for item in found
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> JsonObject:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def completion_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob], *, offset: int) -> JsonObject:
    """{tokens, token_logprobs, top_logprobs, text_offset}; `offset` is where the first token's text begins."""
    tokens = [tokenizer.token_text(item.token_id) for item in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(item.logprob, LOWEST) for item in found],
        "top_logprobs": [_by_text(tokenizer, item) or None for item in found],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Tokenizer, item: TokenLogprob) -> dict[str, float]:
    """Alternatives by their text; of several with one text (parts of characters), the likeliest."""
    found: dict[str, float] = {}
    for token_id, value in item.top:
        found.setdefault(tokenizer.token_text(token_id), max(value, LOWEST))
    return found
