"""The nouns every layer shares: what a request asks for and what a choice gets back. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from wingbeat.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and defaults follow vLLM's; validated on construction.

    Raises RequestError naming the field, the value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Keep the k likeliest tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and output tokens (CTRL, sec. 4.1; vLLM's sign rule)."""
    seed: int | None = None
    """None draws one per request; the same seed gives the same tokens, speculation on or off."""
    max_tokens: int | None = 16
    """None: up to the context length."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    """Number of alternatives per token; 0 gives the chosen token's only; None gives none."""
    max_draft_depth: int | None = None
    """Cap on speculation for this request: 0 switches it off, None leaves it to the policy."""

    def __post_init__(self) -> None:
        checks: list[tuple[str, object, bool, str]] = [
            ("n", self.n, 1 <= self.n <= 128, "an integer from 1 to 128"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= -1, "-1 (off) or a positive integer"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.0 < self.repetition_penalty <= 100.0,
                "a number in (0, 100]",
            ),
            ("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "an integer >= 1"),
            (
                "min_tokens",
                self.min_tokens,
                self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
                "an integer from 0 to max_tokens",
            ),
            ("stop", self.stop, all(self.stop) and len(self.stop) <= 16, "up to 16 non-empty strings"),
            ("stop_token_ids", self.stop_token_ids, len(self.stop_token_ids) <= 64, "up to 64 token ids"),
            (
                "logit_bias",
                self.logit_bias,
                all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()),
                "token id -> number from -100 to 100",
            ),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 20, "an integer from 0 to 20"),
            (
                "max_draft_depth",
                self.max_draft_depth,
                self.max_draft_depth is None or self.max_draft_depth >= 0,
                "an integer >= 0, or null for no cap",
            ),
        ]
        for name, value, ok, allowed in checks:
            if not ok:
                raise RequestError(name, value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request: n choices over one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    json_schema: str | None = None
    """Constrain every choice to this JSON schema (a JSON text; '{}' is any JSON object)."""
    cache_salt: str | None = None
    """Prefix reuse only among requests with the same salt (vLLM's field of that name); None: among those without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities (nats) at one output position, from the target's unshaped logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStats:
    """What speculation did for one finished choice. accept_len = num_output_tokens / num_target_forwards."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    num_output_tokens: int
    num_target_forwards: int
    """Decode forwards this choice took part in; the one that finished its prompt counts, as in plain decoding."""
    num_draft_steps: int
    """Those that verified at least one draft token (vLLM's num_drafts)."""
    num_draft_tokens: int
    num_accepted_drafts: int
    """Bonus tokens excluded."""
    accepted_per_pos: tuple[int, ...] = ()
    """Steps whose draft at depth i+1 was accepted (unconditional counts, as vLLM's per_pos)."""
    drafted_per_pos: tuple[int, ...] = ()
    """Steps that offered at least one draft at depth i+1."""
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one step added to one choice; the last one carries finish_reason and stats."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    text: str
    """New text, complete characters only; held back while a stop string could still begin in it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS and length."""
    error: str | None = None
    stats: ChoiceStats | None = None
