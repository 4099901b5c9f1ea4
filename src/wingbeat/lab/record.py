"""Records of a run, as they lie on disk: what was asked, what each request did, what each block measured.

    run.json        RunRecord       plan, fingerprint, status; rewritten when the run finishes
    requests.jsonl  RequestRecord   one line as each request ends
    blocks.jsonl    BlockRecord     one line as each block ends

Times are seconds of the client's monotonic clock, counted from the start of the block; `started_at` is the only wall
time.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION = 1
UNKNOWN = "unknown"


class Record(BaseModel):
    """Base of all records: frozen, unknown keys refused (a newer format must be read by a newer reader)."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SpeculationUse(Record):
    """What speculation did for one request or in one block; counts only, so that records add up."""

    num_tokens: int = 0
    num_target_forwards: int = 0
    """Target forwards of sequences: one sequence in one step counts one."""
    num_draft_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    drafted_per_pos: tuple[int, ...] = ()


class RequestRecord(Record):
    """One request. Token counts come from the server's `usage`; None means the server did not say."""

    domain: str
    concurrency: int
    block: int
    arm: str
    slot: int
    index: int
    """Place in the order of this block's requests; the same index is the same prompt and seed in every arm."""
    prompt_id: str
    seed: int
    sent_s: float
    lateness_s: float
    """Time between the moment the slot was free and the send: the client's own delay."""
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_chunks: int = 0
    progress: tuple[tuple[float, int], ...] = ()
    """(seconds, tokens so far) per chunk, where the server reports usage continuously."""
    finish_reason: str | None = None
    text_sha: str = ""
    cut: bool = False
    """Ended by the client when the time of the block was over; counts for throughput, not for E2E."""
    error: str | None = None
    speculation: SpeculationUse | None = None

    @property
    def ttft_s(self) -> float | None:
        """Send to the first chunk that carries text."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        """Send to the last chunk that carries text; None for a cut request."""
        return None if self.last_s is None or self.cut else self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1): seconds per output token after the first; None below two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class ClientHealth(Record):
    """What the load generator knows about itself during one block."""

    loop_lag_p99_s: float = 0.0
    send_lateness_p99_s: float = 0.0
    lost_share: float = 0.0
    """Share of slot time that passed between a free slot and its next send."""
    cpu_share: float = 0.0
    """CPU time of this process over wall time; 1.0 is one core."""


class PlanSample(Record):
    """What the server's policy did at one moment of a block."""

    at_s: float
    depth: int
    rows: int
    num_running: int


class ServerTime(Record):
    """Seconds the server spent per part of its steps, during one block."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    listen_s: float = 0.0
    host_s: float = 0.0


class BlockRecord(Record):
    """One arm in one block of one cell (domain x concurrency)."""

    domain: str
    concurrency: int
    block: int
    arm: str
    order: int
    """Place of the arm in its block: 0 ran first."""
    started_s: float
    """Since the start of the run."""
    window_s: tuple[float, float]
    """The steady window: every slot busy."""
    window_tokens: float
    total_s: float
    total_tokens: int
    num_requests: int
    num_errors: int
    num_missing_usage: int
    cached_share: float | None = None
    health: ClientHealth = ClientHealth()
    server_time: ServerTime | None = None
    speculation: SpeculationUse | None = None
    """From the server's counters over the block; includes requests that were cut."""
    plans: tuple[PlanSample, ...] = ()
    invalid: tuple[str, ...] = ()
    """Reasons why this block must not be used; empty when it may."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second in the steady window."""
        seconds = self.window_s[1] - self.window_s[0]
        return self.window_tokens / seconds if seconds > 0 else 0.0

    @property
    def whole_tokens_per_s(self) -> float:
        """Output tokens per second from the first send to the last token, ramp and drain included."""
        return self.total_tokens / self.total_s if self.total_s > 0 else 0.0


class Fingerprint(Record):
    """Everything that must be equal before two figures may be compared, one named dimension each."""

    dimensions: dict[str, str]

    def get(self, name: str) -> str:
        """The value of a dimension; `unknown` when nobody told."""
        return self.dimensions.get(name, UNKNOWN)


class RunPlan(Record):
    """What was asked for."""

    kind: str
    """`single` or `parallel`."""
    url: str
    model: str
    suites: tuple[str, ...]
    concurrency: tuple[int, ...]
    arms: tuple[str, ...]
    blocks: int
    requests_per_block: int | None
    seconds_per_block: float | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    ignore_eos: bool
    prefix_cache: str
    label: str = ""


class RunRecord(Record):
    """One run: plan, fingerprint and how it ended."""

    format_version: int = FORMAT_VERSION
    run_id: str
    started_at: str
    finished_at: str | None = None
    status: str = "running"
    """`running` (or crashed), `finished`, `interrupted`, `failed`."""
    plan: RunPlan
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()
