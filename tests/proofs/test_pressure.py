"""A draft row never costs a page anybody needs: preemptions and prefix hits as in a boot without a drafter."""

from __future__ import annotations

import random

from rig import Outputs, engine, models, prompts, run

from wingbeat.engine.engine import Engine
from wingbeat.spec.plan import OFF, chain, tree
from wingbeat.types import Request, SamplingParams


def shared_prefix_load(seed: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    source = random.Random(seed)
    base = prompts(3, seed=seed, longest=40)
    texts = [base[i % 3] + tuple(source.randrange(8, 250) for _ in range(source.randint(1, 8))) for i in range(18)]
    params = [SamplingParams(temperature=0.0, max_tokens=source.randint(8, 40), ignore_eos=True) for _ in texts]
    return texts, params


def pressed(plan: object, seed: int, **settings: object) -> tuple[Outputs, Engine]:
    texts, params = shared_prefix_load(seed)
    with engine(plan, num_pages=9, max_model_len=96, lanes=6, **settings) as built:  # type: ignore[arg-type]
        return run(built, texts, params), built


def test_preemptions_under_always_are_not_more_than_under_off() -> None:
    totals = {}
    for plan in (OFF, chain(3), tree(5, 4, 16)):
        results = [pressed(plan, seed) for seed in range(6)]
        totals[str(plan)] = sum(built.metrics().preemptions for _, built in results)
    assert totals["off"] > 0, "the pool must be small enough to press"
    assert totals["chain(3)"] <= totals["off"] and totals["tree(5,4,16)"] <= totals["off"], totals


def test_prefix_hit_rate_equals_a_boot_without_a_drafter() -> None:
    texts, params = shared_prefix_load(1)
    hits = {}
    for name, plan, drafter in (("none", OFF, False), ("off", OFF, True), ("chain", chain(3), True)):
        with engine(plan, drafter=drafter, lanes=1) as built:  # one lane: the same order of admissions in all boots
            outputs = run(built, texts, params)
            hits[name] = (built.metrics().prefix_hit_tokens, outputs)
    assert hits["none"][0] > 0
    assert hits["off"] == hits["none"] and hits["chain"] == hits["none"]


def test_abort_at_any_time_gives_everything_back() -> None:
    source = random.Random(3)
    texts, params = shared_prefix_load(3)
    for loop in ("plain", "overlapped"):
        with engine(chain(3), num_pages=9, max_model_len=96, lanes=6, loop=loop) as built:
            for i, (text, each) in enumerate(zip(texts, params, strict=True)):
                built.add(Request(request_id=f"r{i}", prompt_token_ids=text, params=each))
            ended: set[str] = set()
            while built.has_work():
                ended |= {d.request_id for d in built.step() if d.finish_reason is not None}
                victim = f"r{source.randrange(len(texts))}"
                if source.random() < 0.3 and victim not in ended:
                    for delta in built.abort(victim):
                        assert delta.finish_reason == "abort" and delta.request_id not in ended
                        ended.add(delta.request_id)
            built._prefix.pages.check()
            assert built._prefix.pages.num_held == 0
            assert ended == {f"r{i}" for i in range(len(texts))}


def test_logits_that_are_not_finite_fail_only_their_request() -> None:
    target, _ = models()
    with engine(chain(3)) as built:
        poisoned = target.embedding[250].clone()
        target.embedding[250] = float("nan")
        try:
            built.add(Request(request_id="bad", prompt_token_ids=(250, 9), params=SamplingParams(max_tokens=4)))
            built.add(Request(request_id="good", prompt_token_ids=(9, 10), params=SamplingParams(max_tokens=4)))
            reasons = {}
            while built.has_work():
                for delta in built.step():
                    if delta.finish_reason is not None:
                        reasons[delta.request_id] = (delta.finish_reason, delta.error)
        finally:
            target.embedding[250] = poisoned
    assert reasons["bad"][0] == "error" and "finite" in reasons["bad"][1]
    assert reasons["good"][0] in ("length", "stop")
