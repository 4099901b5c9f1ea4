"""UsageMeter: tokens of one answer, counted from token ids, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from wingbeat.types import ChoiceDelta, ChoiceStats, Request

JsonObject = dict[str, object]


class UsageMeter:
    """Counts deltas; `record()` is OpenAI's usage object at any moment."""

    def __init__(self, requests: Iterable[Request], *, with_speculation: bool) -> None:
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._completion_tokens = 0
        self._with_speculation = with_speculation
        self._cached: dict[str, int] = {}
        self._stats: list[ChoiceStats] = []

    def add(self, delta: ChoiceDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        if delta.stats is not None:
            self._stats.append(delta.stats)
            # Choices of one prompt share its cached pages; the prompt is counted once, as OpenAI does.
            known = self._cached.get(delta.request_id, delta.stats.num_cached_tokens)
            self._cached[delta.request_id] = min(known, delta.stats.num_cached_tokens)

    def record(self) -> JsonObject:
        usage: JsonObject = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._with_speculation:
            usage["speculation"] = speculation_record(self._stats)
        return usage


def speculation_record(stats: list[ChoiceStats]) -> JsonObject:
    """Fields of ChoiceStats summed over the choices that have ended, and accept_len (bonus included, plain = 1.0)."""
    output, forwards = sum(s.num_output_tokens for s in stats), sum(s.num_target_forwards for s in stats)
    return {
        "num_output_tokens": output,
        "num_target_forwards": forwards,
        "num_draft_steps": sum(s.num_draft_steps for s in stats),
        "num_draft_tokens": sum(s.num_draft_tokens for s in stats),
        "num_accepted_drafts": sum(s.num_accepted_drafts for s in stats),
        "accepted_per_pos": _sums(s.accepted_per_pos for s in stats),
        "drafted_per_pos": _sums(s.drafted_per_pos for s in stats),
        "num_cached_tokens": sum(s.num_cached_tokens for s in stats),
        "num_preemptions": sum(s.num_preemptions for s in stats),
        "accept_len": round(output / forwards, 4) if forwards else None,
    }


def _sums(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
