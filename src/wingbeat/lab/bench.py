"""One benchmark run from its spec to its directory: who is the server, may the arms run, conduct, restore."""

from __future__ import annotations

import asyncio
import platform
from dataclasses import replace
from pathlib import Path

import aiohttp

from wingbeat import __version__
from wingbeat.errors import ConfigError
from wingbeat.lab.arms import NO_ARM, parse_arms
from wingbeat.lab.client import ChatClient
from wingbeat.lab.conduct import Conductor, Station
from wingbeat.lab.experiment import BenchSpec, Progress, Watch
from wingbeat.lab.fingerprint import fingerprint
from wingbeat.lab.ledger import RunWriter, new_run_id, now
from wingbeat.lab.record import RunPlan, RunRecord
from wingbeat.lab.remote import Remote

__all__ = ["NO_ARM", "BenchSpec", "Progress", "run_bench"]


def run_bench(spec: BenchSpec, watch: Watch = lambda progress: None) -> Path:
    """Runs the benchmark; the value is the run's directory. What finished stays on disk whatever happens."""
    return asyncio.run(_run(spec, watch))


async def _run(spec: BenchSpec, watch: Watch) -> Path:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        stations = await _meet(spec, session)
        names = tuple(station.arm.name for station in stations)
        spec = replace(spec, schedule=replace(spec.schedule, arms=names))
        originals = {s.arm.url: await s.remote.policy() for s in stations if s.arm.policy is not None}
        writer = RunWriter(spec.out, await _run_record(spec, stations))
        conductor = Conductor(spec, stations, writer, watch)
        status = "failed"
        try:
            await conductor.run_all()
            status = "finished"
        except asyncio.CancelledError:
            status = "interrupted"
            raise
        finally:
            path = writer.finish(status, tuple(conductor.notes))
            await _restore(session, originals)
        return path


async def _meet(spec: BenchSpec, session: aiohttp.ClientSession) -> tuple[Station, ...]:
    """Every arm's server, asked for its model and whether it can do what the arm needs."""
    stations = []
    for arm in parse_arms(spec.schedule.arms, spec.url):
        remote = Remote(session, arm.url)
        # Another server may call the same model by another name.
        model = await remote.model(spec.model if arm.url == spec.url.rstrip("/") else None)
        policy = await remote.policy()
        if policy is None and arm.policy is not None:
            raise ConfigError(
                "arms", arm.name, f"{arm.url} has no /v1/speculation: only {NO_ARM!r} and NAME=URL can run"
            )
        client = ChatClient(session, arm.url, model, speculation=policy is not None)
        stations.append(Station(arm, client, remote))
    return tuple(stations)


async def _restore(session: aiohttp.ClientSession, originals: dict[str, str | None]) -> None:
    """Leaves each server with the policy it had; a server that is gone by now is no error."""
    for url, policy in originals.items():
        try:
            if policy is not None:
                await Remote(session, url).set_policy(policy)
        except (aiohttp.ClientError, OSError, ConfigError):
            continue


async def _run_record(spec: BenchSpec, stations: tuple[Station, ...]) -> RunRecord:
    schedule, sampling = spec.schedule, spec.sampling
    plan = RunPlan(
        kind=spec.kind,
        url=spec.url,
        model=stations[0].client.model,
        suites=tuple(suite.identity for suite in schedule.suites),
        concurrency=schedule.concurrency,
        arms=schedule.arms,
        blocks=schedule.blocks,
        requests_per_block=schedule.load.requests,
        seconds_per_block=schedule.load.seconds,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=spec.seed,
        ignore_eos=sampling.ignore_eos,
        prefix_cache=spec.prefix_cache,
        label=spec.label,
    )
    client = f"wingbeat {__version__}, python {platform.python_version()}, aiohttp {aiohttp.__version__}"
    return RunRecord(
        run_id=new_run_id(spec.kind, spec.label),
        started_at=now(),
        plan=plan,
        fingerprint=fingerprint(plan, await _facts(spec, stations), client),
    )


async def _facts(spec: BenchSpec, stations: tuple[Station, ...]) -> dict[str, str]:
    """Facts of the server under test; those of another server stand under `ARM:`."""
    main = spec.url.rstrip("/")
    mine = [station for station in stations if station.arm.url == main]
    facts = await mine[0].remote.facts() if mine else {}
    for station in stations:
        if station.arm.url != main:
            facts |= {f"{station.arm.name}:{key}": value for key, value in (await station.remote.facts()).items()}
    return facts
