"""Sequence: the host's view of one choice of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat.engine.metrics import count_positions
from wingbeat.text.detokenize import Detokenizer
from wingbeat.text.grammar import Matcher
from wingbeat.types import ChoiceStats, Request


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, pages and counters of one choice. The device's lengths may be ahead while steps are unread."""

    request: Request
    choice_index: int
    seed: int
    arrival: int
    """Order of arrival; the newest is preempted first."""
    max_len: int
    """Prompt and output tokens it may reach."""
    detokenizer: Detokenizer
    tokens: list[int]
    matcher: Matcher | None = None
    lane: int = -1
    pages: list[int] = field(default_factory=list[int])
    num_table_pages: int = 0
    """How many of them the lane's page table already shows."""
    page_keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of the pages already findable by prefix."""
    prefill_len: int = 0
    """Tokens known when it was admitted; it decodes once all of them are scheduled."""
    num_scheduled: int = 0
    """How many of those have been scheduled."""
    num_unread: int = 0
    """Most tokens that steps not read yet can add."""
    num_unread_sure: int = 0
    """Fewest: each of those that samples adds one at least."""
    num_unread_steps: int = 0
    """Those steps, prefill chunks that sample nothing included: they hold its lane and pages."""
    context_len: int = 0
    """Tokens whose K/V is in pages, as far as read."""
    num_cached_tokens: int = 0
    num_target_forwards: int = 0
    num_draft_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    accepted_per_pos: list[int] = field(default_factory=list[int])
    drafted_per_pos: list[int] = field(default_factory=list[int])
    num_preemptions: int = 0
    finished: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_len

    @property
    def surely_ends(self) -> bool:
        """The unread steps are enough to reach max_len."""
        return len(self.tokens) + self.num_unread_sure >= self.max_len

    @property
    def context_bound(self) -> int:
        """Most tokens that can be in pages once every unread step is done."""
        return min(len(self.tokens) - 1 + self.num_unread, self.max_len - 1)

    def note_handed_over(self, bound: int) -> None:
        """A step that adds at most `bound` tokens is on its way."""
        self.num_unread += bound
        self.num_unread_sure += bound > 0
        self.num_unread_steps += 1

    def note_read(self, bound: int) -> None:
        """The step handed over with `bound` was read."""
        self.num_unread -= bound
        self.num_unread_sure -= bound > 0
        self.num_unread_steps -= 1

    def count_drafts(self, depth: int, num_drafts: int, num_accepted: int) -> None:
        """Books one verified step: `num_drafts` nodes down to `depth`, of which `num_accepted` were delivered."""
        self.num_draft_steps += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_drafts += num_accepted
        count_positions(self.drafted_per_pos, self.accepted_per_pos, depth, num_accepted)

    def stats(self) -> ChoiceStats:
        return ChoiceStats(
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.tokens) - self.prompt_len,
            num_target_forwards=self.num_target_forwards,
            num_draft_steps=self.num_draft_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_drafts=self.num_accepted_drafts,
            accepted_per_pos=tuple(self.accepted_per_pos),
            drafted_per_pos=tuple(self.drafted_per_pos),
            num_preemptions=self.num_preemptions,
        )
