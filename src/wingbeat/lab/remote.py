"""What a server tells about itself beside its answers: facts, counters, and the policy that can be set at run time.

Everything here is optional but `/v1/models`: a server that lacks an endpoint yields None or `unknown`, never a guess.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from wingbeat.errors import ConfigError, LabError
from wingbeat.lab.record import PlanSample, ServerTime, SpeculationUse

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters of a server at one moment; names without the engine's prefix."""

    values: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """(name, label that tells series apart: `part` or `position`) -> value, summed over all other labels."""

    def since(self, earlier: Counters) -> Counters:
        return Counters({key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()})

    def total(self, name: str, label: str = "") -> float:
        return self.values.get((name, label), 0.0)

    def has(self, name: str) -> bool:
        return any(key[0] == name for key in self.values)

    def by_position(self, name: str) -> tuple[int, ...]:
        """Values of a per-position counter, position 0 first."""
        found = {int(label): round(value) for (key, label), value in self.values.items() if key == name and label}
        return tuple(found.get(i, 0) for i in range(max(found) + 1)) if found else ()


def parse_metrics(text: str) -> Counters:
    """Counters from a Prometheus page, of Wingbeat or of vLLM (same names after the prefix)."""
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or line.startswith("#"):
            continue
        labels: dict[str, str] = dict(_LABEL.findall(found[2] or ""))
        name = str(found[1]).rpartition(":")[2]
        key = (name, labels.get("part", labels.get("position", "")))
        values[key] = values.get(key, 0.0) + float(found[3])
    return Counters(values)


def speculation_in(counters: Counters) -> SpeculationUse | None:
    """What the counters of a block say about speculation; None when the server does not count."""
    if not counters.has("generation_tokens_total"):
        return None
    accepted = round(counters.total("spec_decode_num_accepted_tokens_total"))
    generated = round(counters.total("generation_tokens_total"))
    drafts = round(counters.total("spec_decode_num_drafts_total"))
    per_pos = counters.by_position("spec_decode_num_accepted_tokens_per_pos_total")
    drafted = counters.by_position("spec_decode_num_draft_tokens_per_pos_total")
    return SpeculationUse(
        num_tokens=generated,
        # Each sequence step commits its accepted drafts and one token of the target's own.
        num_target_forwards=max(generated - accepted, 0),
        num_draft_steps=drafts,
        num_draft_tokens=round(counters.total("spec_decode_num_draft_tokens_total")),
        num_accepted_drafts=accepted,
        accepted_per_pos=per_pos,
        drafted_per_pos=drafted,
    )


def time_in(counters: Counters) -> ServerTime | None:
    """Seconds per part of the step; None when the server does not say."""
    name = "step_time_seconds_total"
    if not counters.has(name):
        return None
    parts = {f"{part}_s": counters.total(name, part) for part in ("draft", "verify", "accept", "listen", "host")}
    return ServerTime(**parts)


class Remote:
    """The side endpoints of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url.rstrip("/")

    async def model(self, wanted: str | None) -> str:
        """The model's name on the server; checks `wanted` against what is served."""
        page = await self._json("/v1/models")
        if page is None:
            raise LabError(f"{self.url}/v1/models does not answer: is an OpenAI-compatible server running there?")
        names = [entry["id"] for entry in page.get("data", [])]
        if wanted is None and names:
            return str(names[0])
        if wanted is None or (names and wanted not in names):
            raise ConfigError("model", wanted, f"served at {self.url}: {', '.join(names) or 'nothing'}")
        return wanted

    async def facts(self) -> dict[str, str]:
        """/server_info and /version flattened to text; empty where the server has neither."""
        info = await self._json("/server_info") or {}
        version = await self._json("/version") or {}
        return _flat(version) | _flat(info)

    async def counters(self) -> Counters | None:
        text = await self._text("/metrics")
        return None if text is None else parse_metrics(text)

    async def policy(self) -> str | None:
        """The policy now set; None on servers without policies."""
        page = await self._json("/v1/speculation")
        return None if page is None else str(page.get("policy"))

    async def set_policy(self, spec: str) -> None:
        """Sets the policy of the running server. Raises ConfigError when the server refuses."""
        async with self._session.post(f"{self.url}/v1/speculation", json={"policy": spec}) as response:
            if response.status != 200:
                raise ConfigError("arms", spec, f"the server answered {response.status}: {await response.text()}")

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; False where the server offers no such thing."""
        async with self._session.post(f"{self.url}/reset_prefix_cache") as response:
            return response.status == 200

    async def plan(self, start: float) -> PlanSample | None:
        """What the policy does right now."""
        page = await self._json("/v1/speculation")
        return None if page is None else _plan_sample(page, perf_counter() - start)

    async def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Returns when no request runs any more, so that a cut block does not leak into the next."""
        end = perf_counter() + timeout_s
        while perf_counter() < end:
            page = await self._json("/v1/speculation")
            if page is None or int(page.get("num_running", 0)) + int(page.get("num_waiting", 0) or 0) == 0:
                return
            await asyncio.sleep(0.02)
        raise LabError(f"requests still run at {self.url} {timeout_s:.0f} s after they were cancelled")

    async def _json(self, path: str) -> dict[str, Any] | None:
        text = await self._text(path)
        if text is None:
            return None
        try:
            page = json.loads(text)
        except ValueError:
            return None
        return page if isinstance(page, dict) else None

    async def _text(self, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with self._session.get(self.url + path, timeout=timeout) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None


def _plan_sample(page: dict[str, Any], at_s: float) -> PlanSample:
    plan = page.get("plan")
    source: dict[str, Any] = plan if isinstance(plan, dict) else page
    return PlanSample(
        at_s=round(at_s, 3),
        depth=int(source.get("depth") or 0),
        rows=int(source.get("rows") or 0),
        num_running=int(page.get("num_running") or 0),
    )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves as text under dotted names."""
    leaves: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return leaves
