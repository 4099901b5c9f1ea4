"""The schedule: arms alternate, prompts rotate, warm-up prompts stay out."""

from __future__ import annotations

from wingbeat.lab.suites import Prompt, Suite
from wingbeat.lab.workload import Load, Schedule, prompt_at, seed_at, split_warm_up

PROMPTS = tuple(Prompt(id=f"p{i}", messages=[{"role": "user", "content": "x"}]) for i in range(64))
SUITE = Suite(name="s", version="1", provenance="test", prompts=PROMPTS, digest="0")


def schedule(load: Load) -> Schedule:
    return Schedule(suites=(SUITE,), concurrency=(1, 8), arms=("a", "b", "c"), blocks=2, load=load)


def test_blocks_mirror_the_order_of_arms() -> None:
    turns = list(schedule(Load(requests=4)).turns())
    assert len(turns) == schedule(Load(requests=4)).num_turns == 12
    assert "".join(turn.arm for turn in turns) == "abc" * 2 + "cba" * 2
    assert [turn.order for turn in turns[6:9]] == [0, 1, 2]


def test_no_block_has_fewer_than_two_requests_per_stream() -> None:
    plan = schedule(Load(requests=4))
    assert (plan.load_at(1).requests, plan.load_at(8).requests) == (4, 16)
    assert schedule(Load(seconds=3.0)).load_at(8) == Load(requests=None, seconds=3.0)


def test_a_block_visits_every_prompt_before_it_repeats_one() -> None:
    _, measured = split_warm_up(SUITE)
    ids = [prompt_at(measured, 1, 8, index).id for index in range(len(measured))]
    assert sorted(ids) == sorted(p.id for p in measured)
    assert ids != [prompt_at(measured, 0, 8, index).id for index in range(len(measured))]


def test_warm_up_prompts_are_not_measured() -> None:
    warm, measured = split_warm_up(SUITE)
    assert not {p.id for p in warm} & {p.id for p in measured}
    assert len(warm) + len(measured) == 64


def test_seeds_differ_between_requests_and_blocks() -> None:
    seeds = {seed_at(seed, block, index) for seed in range(3) for block in range(4) for index in range(64)}
    assert len(seeds) == 3 * 4 * 64
