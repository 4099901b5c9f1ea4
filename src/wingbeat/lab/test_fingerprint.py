"""Fingerprints: what the server tells lands under its dimension, what it does not tell is unknown."""

from __future__ import annotations

from wingbeat.lab.fingerprint import FACTS, HARD, SOFT, fingerprint
from wingbeat.lab.record import RunPlan

PLAN = RunPlan(
    kind="parallel",
    url="http://h",
    model="m",
    suites=("coding@1:0",),
    concurrency=(1, 2),
    arms=("off", "peer"),
    blocks=1,
    requests_per_block=2,
    seconds_per_block=None,
    max_tokens=8,
    temperature=0.0,
    top_p=1.0,
    seed=0,
    ignore_eos=False,
    prefix_cache="warm",
)


def test_facts_of_our_server_find_their_dimension() -> None:
    facts = {"version": "0.1", "config.policy": "auto", "config.dtype": "auto", "packages.torch": "2.13", "cpu": "X"}
    told = fingerprint(PLAN, facts, "client 1")
    assert told.get("engine_version") == "0.1"
    assert told.get("engine_flags") == '{"config.dtype": "auto", "config.policy": "auto"}'
    assert told.get("torch") == "2.13"
    assert told.get("concurrency") == "1 2"
    assert told.get("drafter_digest") == "unknown"
    assert told.get("other_servers") == "none"


def test_a_second_server_is_part_of_the_fingerprint() -> None:
    told = fingerprint(PLAN, {"version": "0.1", "peer:version": "9"}, "client 1")
    assert told.get("engine_version") == "0.1"
    assert told.get("other_servers") == '{"peer:version": "9"}'


def test_every_dimension_is_either_hard_or_soft() -> None:
    told = fingerprint(PLAN, {"peer:version": "9"}, "client 1")
    assert set(told.dimensions) == set(HARD) | set(SOFT)
    assert not set(HARD) & set(SOFT)
    assert set(FACTS) <= set(HARD) | set(SOFT)
