"""EngineConfig: what the user asks of an engine. Nothing edits it afterwards. Names follow vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wingbeat.errors import ConfigError, unknown_name
from wingbeat.spec.plan import Rule, parse_rule
from wingbeat.spec.policy import Policy, Threshold, parse_policy

Dtype = Literal["auto", "bfloat16", "float32", "float64"]
Loop = Literal["plain", "overlapped"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str = "smollm2"
    """A directory with config.json and safetensors, a GGUF file, or `smollm2` (the embedded default)."""
    speculative_model: str = "auto"
    """EAGLE-3 drafter: a directory, `default` (shipped, for smollm2), `none` or `auto` (default for smollm2)."""
    policy: str = "auto"
    """off | always[:PLAN] | threshold:N | table:LO-HI=PLAN,... | auto; PLAN is off, chain(k) or tree(d,t,n)."""
    speculative_plan: str = "chain(3)"
    """The plan of `always` and of `threshold` where the policy names none."""
    speculative_disable_batch_threshold: int | None = None
    """Never speculate while more than this many sequences run; shorthand for policy threshold:N."""
    max_model_len: int | None = None
    """Context length in tokens; None: the model's own, at most 8192."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Prefill rows of one step, decoding rows counted in."""
    block_size: int = 16
    """Tokens per K/V page."""
    num_gpu_blocks_override: int | None = None
    """Pages of the K/V pool, whatever memory says."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the target's K/V pool; None: a share of memory, see gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.25
    """Share of the device's free memory (on a CPU: of free RAM, capped at 2 GiB) for the K/V pool."""
    enable_prefix_caching: bool = True
    dtype: Dtype = "auto"
    """auto: bfloat16."""
    num_threads: int | None = None
    """CPU threads; None: all cores."""
    seed: int = 0
    """Seeds requests that bring no seed of their own, and dummy weights."""
    load_format: LoadFormat = "auto"
    """dummy: random weights of the model's shape (speed tests)."""
    loop: Loop = "plain"
    """overlapped: the host works on the results of one step while the next one runs; plain: one after the other."""
    kernels: str | None = None
    """Force a kernel backend (torch | cpu); None picks the fastest that fits. For tests and comparison."""

    def __post_init__(self) -> None:
        positive = "an integer >= 1"
        checks: list[tuple[str, object, bool, str]] = [
            ("max_model_len", self.max_model_len, self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("max_num_seqs", self.max_num_seqs, 1 <= self.max_num_seqs <= 1024, "an integer from 1 to 1024"),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                self.max_num_batched_tokens >= 1,
                positive,
            ),
            ("block_size", self.block_size, 1 <= self.block_size <= 256, "an integer from 1 to 256"),
            (
                "num_gpu_blocks_override",
                self.num_gpu_blocks_override,
                self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 1,
                positive,
            ),
            (
                "kv_cache_memory_bytes",
                self.kv_cache_memory_bytes,
                self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes >= 1,
                positive,
            ),
            (
                "gpu_memory_utilization",
                self.gpu_memory_utilization,
                0.0 < self.gpu_memory_utilization <= 1.0,
                "a number in (0, 1]",
            ),
            ("num_threads", self.num_threads, self.num_threads is None or self.num_threads >= 1, positive),
            (
                "speculative_disable_batch_threshold",
                self.speculative_disable_batch_threshold,
                self.speculative_disable_batch_threshold is None or self.speculative_disable_batch_threshold >= 0,
                "an integer >= 0",
            ),
        ]
        for name, value, ok, allowed in checks:
            if not ok:
                raise ConfigError(name, value, allowed)
        for name, value, names in (
            ("dtype", self.dtype, ("auto", "bfloat16", "float32", "float64")),
            ("loop", self.loop, ("plain", "overlapped")),
            ("load_format", self.load_format, ("auto", "dummy")),
        ):
            if value not in names:
                raise unknown_name(name, value, names)
        if self.speculative_disable_batch_threshold is not None and self.policy != "auto":
            raise ConfigError("policy", self.policy, "not together with speculative_disable_batch_threshold")
        self.first_policy()

    @property
    def plan(self) -> Rule:
        """speculative_plan, read. Raises ConfigError."""
        try:
            return parse_rule(self.speculative_plan)
        except ConfigError as error:
            raise _naming(error, "speculative_plan", self.speculative_plan) from None

    def read_policy(self, spec: str) -> Policy:
        """A policy, with this configuration's plan where it names none. Raises ConfigError."""
        plan = self.plan
        try:
            return parse_policy(spec, plan)
        except ConfigError as error:
            raise _naming(error, "policy", spec) from None

    def first_policy(self) -> Policy:
        """The policy to begin with. Raises ConfigError."""
        if self.speculative_disable_batch_threshold is not None:
            return Threshold(self.speculative_disable_batch_threshold, self.plan)
        return self.read_policy(self.policy)

    @property
    def drafter_name(self) -> str | None:
        """What load_drafter takes; None for no drafter."""
        if self.speculative_model == "auto":
            return "default" if self.model == "smollm2" and self.load_format != "dummy" else None
        return None if self.speculative_model == "none" else self.speculative_model


def _naming(error: ConfigError, field: str, value: str) -> ConfigError:
    """An error about a part of a setting (the depth of a plan) as one about the setting."""
    return (
        error if error.field == field else ConfigError(field, value, f"{error.field}={error.value!r}: {error.allowed}")
    )
