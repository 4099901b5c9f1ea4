"""One benchmark run from its spec to its directory: who is the server, may the arms run, conduct, leave all as it was."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import aiohttp

from wingbeat import __version__
from wingbeat.errors import ConfigError
from wingbeat.lab.client import ChatClient
from wingbeat.lab.conduct import Conductor
from wingbeat.lab.experiment import NO_ARM, BenchSpec, Progress, Watch
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
        remote = Remote(session, spec.url)
        model = await remote.model(spec.model)
        original = await remote.policy()
        _check_arms(spec.schedule.arms, original, spec.url)
        writer = RunWriter(spec.out, _run_record(spec, model, await remote.facts()))
        client = ChatClient(session, spec.url, model, speculation=original is not None)
        conductor = Conductor(spec, client, remote, writer, watch)
        status = "failed"
        try:
            await conductor.run_all()
            status = "finished"
        except asyncio.CancelledError:
            status = "interrupted"
            raise
        finally:
            path = writer.finish(status, tuple(conductor.notes))
            if original is not None:
                await _restore(remote, original)
        return path


async def _restore(remote: Remote, policy: str) -> None:
    """Leaves the server with the policy it had; a server that is gone by now is no error."""
    try:
        await remote.set_policy(policy)
    except (aiohttp.ClientError, OSError, ConfigError):
        return


def _check_arms(arms: tuple[str, ...], policy: str | None, url: str) -> None:
    if policy is None and arms != (NO_ARM,):
        allowed = f"{url} has no /v1/speculation, so only the arm {NO_ARM!r} can run"
        raise ConfigError("arms", " ".join(arms), allowed)
    if len(set(arms)) != len(arms):
        raise ConfigError("arms", " ".join(arms), "each arm once")


def _run_record(spec: BenchSpec, model: str, facts: dict[str, str]) -> RunRecord:
    schedule, sampling = spec.schedule, spec.sampling
    plan = RunPlan(
        kind=spec.kind,
        url=spec.url,
        model=model,
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
        fingerprint=fingerprint(plan, facts, client),
    )
