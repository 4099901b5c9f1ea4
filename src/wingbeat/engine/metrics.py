"""What the engine counts and what it believes, as plain records that the server and the policy read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from wingbeat.spec.plan import Rule

TIMELINE_LEN = 512


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Cumulative counters since start and gauges of now."""

    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    target_forwards: int = 0
    """Steps of the engine with at least one sampled row."""
    steps: int = 0
    preemptions: int = 0
    num_drafts: int = 0
    """Sequence steps that verified at least one draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts whose tokens were delivered: what an end cut off is not in it, as in vLLM. Bonus tokens excluded."""
    accepted_per_pos: list[int] = field(default_factory=list[int])
    drafted_per_pos: list[int] = field(default_factory=list[int])
    probes: int = 0
    finished: dict[str, int] = field(default_factory=dict[str, int])
    """Choices by finish reason."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    pages_total: int = 0
    pages_held: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    listen_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time between steps that no step ran in."""
    plan_depth: int = 0
    plan_topk: int = 1
    plan_rows: int = 0
    """Rows of the newest step's target forward, prefill rows included."""
    predicted_tokens_per_s: float = 0.0
    achieved_tokens_per_s: float = 0.0

    def count_drafts(self, depth: int, num_drafts: int, num_accepted: int) -> None:
        """Books one verified step of one choice: `num_drafts` nodes down to `depth`, `num_accepted` delivered."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        count_positions(self.drafted_per_pos, self.accepted_per_pos, depth, num_accepted)


def count_positions(drafted: list[int], accepted: list[int], depth: int, num_accepted: int) -> None:
    """Adds one step to counts by position: drafts were offered down to `depth`, the first `num_accepted` accepted."""
    for counts, reached in ((drafted, depth), (accepted, num_accepted)):
        counts.extend([0] * (depth - len(counts)))
        for i in range(reached):
            counts[i] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """One change of plan or of load."""

    at_s: float
    """Monotonic seconds since the engine started."""
    plan: str
    num_running: int
    predicted_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """What the policy thinks: acceptance by depth and rates in tokens/s."""

    acceptance: tuple[float, ...]
    """Conditional, depth 1.."""
    predicted_tokens_per_s: float | None
    predicted_off_tokens_per_s: float | None
    achieved_tokens_per_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationState:
    """Answer of GET /v1/speculation."""

    policy: str
    plan: str
    depth: int
    topk: int
    rows: int
    num_running: int
    num_waiting: int
    drafter: str | None
    beliefs: Beliefs
    timeline: tuple[TimelinePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that fingerprint this engine."""

    version: str
    model: str
    architecture: str
    target_digest: str
    drafter: str | None
    drafter_digest: str | None
    dtype: str
    device: str
    kernels: str
    num_threads: int
    max_model_len: int
    num_pages: int
    page_size: int
    config: dict[str, str]
    """Every engine setting as text."""


class Timeline:
    """The last changes of plan or load, oldest first."""

    def __init__(self) -> None:
        self._points: deque[TimelinePoint] = deque(maxlen=TIMELINE_LEN)

    def note(self, at_s: float, rule: Rule, num_running: int, predicted_tokens_per_s: float | None) -> None:
        last = self._points[-1] if self._points else None
        if last is None or last.plan != str(rule) or last.num_running != num_running:
            self._points.append(
                TimelinePoint(
                    at_s=at_s,
                    plan=str(rule),
                    num_running=num_running,
                    predicted_tokens_per_s=predicted_tokens_per_s,
                )
            )

    def points(self) -> tuple[TimelinePoint, ...]:
        return tuple(self._points)
