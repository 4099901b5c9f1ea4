"""The fingerprint of a run: named dimensions, so that a refusal can say which one differs."""

from __future__ import annotations

import json

from wingbeat.lab.record import UNKNOWN, Fingerprint, RunPlan

FACTS = {
    "engine_version": ("version", "engine.version"),
    "engine": ("engine",),
    "engine_flags": ("config", "flags", "server_args"),
    "target_digest": ("target_digest",),
    "drafter_digest": ("drafter_digest",),
    "dtype": ("dtype",),
    "device": ("device",),
    "cpu": ("cpu",),
    "kernels": ("kernels",),
    "threads": ("num_threads",),
    "chat_template": ("chat_template_hash",),
    "torch": ("packages.torch", "torch"),
    "packages": ("packages",),
    "server_python": ("python",),
}
"""Dimension -> names under which servers tell it; nested facts arrive under dotted names."""

HARD = (
    "kind",
    "suites",
    "arms",
    "concurrency",
    "sampling",
    "max_tokens",
    "ignore_eos",
    "seed",
    "prefix_cache",
    "model",
    "engine",
    "engine_version",
    "engine_flags",
    "target_digest",
    "drafter_digest",
    "dtype",
    "device",
    "kernels",
    "threads",
    "chat_template",
    "cpu",
    "other_servers",
)
"""A difference in any of these confounds a comparison, unless it is the factor under test."""

SOFT = ("torch", "packages", "server_python", "client", "block_load")
"""A difference in these is flagged."""


def fingerprint(plan: RunPlan, facts: dict[str, str], client: str) -> Fingerprint:
    """All dimensions of a run; what the server does not tell is `unknown`."""
    asked = {
        "kind": plan.kind,
        "suites": " ".join(plan.suites),
        "arms": " ".join(plan.arms),
        "concurrency": " ".join(map(str, plan.concurrency)),
        "sampling": f"temperature={plan.temperature} top_p={plan.top_p}",
        "max_tokens": str(plan.max_tokens),
        "ignore_eos": str(plan.ignore_eos),
        "seed": str(plan.seed),
        "prefix_cache": plan.prefix_cache,
        "block_load": json.dumps([plan.blocks, plan.requests_per_block, plan.seconds_per_block]),
        "model": plan.model,
        "client": client,
    }
    others = {name: value for name, value in sorted(facts.items()) if ":" in name}
    asked["other_servers"] = json.dumps(others) if others else "none"
    return Fingerprint(dimensions=asked | {name: _fact(facts, keys) for name, keys in FACTS.items()})


def _fact(facts: dict[str, str], keys: tuple[str, ...]) -> str:
    for key in keys:
        if key in facts:
            return facts[key]
        nested = {name: value for name, value in sorted(facts.items()) if name.startswith(f"{key}.")}
        if nested:
            return json.dumps(nested)
    return UNKNOWN
