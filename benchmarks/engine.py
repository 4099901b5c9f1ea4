"""Engine throughput in process: boots and policies side by side, interleaved, no HTTP in between.

    python benchmarks/engine.py --arms none off "chain(3)" auto --concurrency 1 8 32 --domains coding
    python benchmarks/engine.py --arms none none@0.7

`none` is a boot without a drafter; every other arm is a policy (a plan means always:PLAN) of one boot with it; @T
samples with temperature T (top-p as given). Each block answers the same prompts in the same order with the same seeds;
ratios are paired by block against the first arm.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import tyro

from wingbeat.engine.config import EngineConfig
from wingbeat.engine.engine import Engine
from wingbeat.types import Request, SamplingParams

SUITES = Path(__file__).parents[1] / "src/wingbeat/lab/suites/data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    arms: tuple[str, ...] = ("none", "off", "chain(3)", "auto")
    concurrency: tuple[int, ...] = (1, 8, 32)
    domains: tuple[str, ...] = ("coding",)
    """Shipped suites, or paths of JSONL files with `messages`."""
    blocks: int = 5
    requests: int = 4
    """Requests per block: this many times the concurrency, at least 4."""
    max_tokens: int = 96
    top_p: float = 0.95
    """Of arms that sample."""
    loop: str = "plain"
    num_threads: int | None = None
    model: str = "smollm2"
    json: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    tokens_per_s: float
    accept_len: float


Prompts = list[tuple[int, ...]]


def load_prompts(engine: Engine, domain: str) -> Prompts:
    path = Path(domain) if domain.endswith(".jsonl") else SUITES / f"{domain}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(engine.encode_chat(row["messages"])) for row in rows]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    policy: str  # "none": a boot without a drafter
    temperature: float


def parse_arm(name: str) -> Arm:
    plan, _, temperature = name.partition("@")
    policy = plan if plan in ("none", "off", "auto") or ":" in plan else f"always:{plan}"
    return Arm(name, policy, float(temperature or 0.0))


def run_block(engine: Engine, arm: Arm, concurrency: int, options: Options, prompts: Prompts, first: int) -> Block:
    """Closed loop: `concurrency` requests in flight until all are done."""
    if arm.policy != "none":
        engine.set_policy(arm.policy)
    count = max(options.requests * concurrency, 4)
    settings = SamplingParams(temperature=arm.temperature, top_p=options.top_p, max_tokens=options.max_tokens)
    params = [replace(settings, seed=i) for i in range(count)]
    engine.reset_prefix_cache()
    waiting = [
        Request(request_id=f"b{first}-{i}", prompt_token_ids=prompts[(first + i) % len(prompts)], params=params[i])
        for i in range(count)
    ]
    running = tokens = forwards = 0
    started = perf_counter()
    while waiting or engine.has_work():
        while waiting and running < concurrency:
            engine.add(waiting.pop(0))
            running += 1
        for delta in engine.step():
            tokens += len(delta.token_ids)
            if delta.stats is not None:
                running -= 1
                forwards += delta.stats.num_target_forwards
    return Block(tokens / (perf_counter() - started), tokens / max(forwards, 1))


def boot(options: Options, bare: bool) -> Engine:
    return Engine.from_config(
        EngineConfig(
            model=options.model,
            speculative_model="none" if bare else "auto",
            loop=options.loop,  # type: ignore[arg-type]
            num_threads=options.num_threads,
        )
    )


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    arms = [parse_arm(name) for name in options.arms]
    boots = {bare: boot(options, bare) for bare in sorted({arm.policy == "none" for arm in arms})}
    results: dict[tuple[str, int, str], list[Block]] = {}
    for domain in options.domains:
        prompts = load_prompts(next(iter(boots.values())), domain)
        for concurrency in options.concurrency:
            for number in range(-1, options.blocks):  # block -1 warms up
                for arm in arms if number % 2 else arms[::-1]:
                    engine = boots[arm.policy == "none"]
                    block = run_block(engine, arm, concurrency, options, prompts, 7 * (number + 1))
                    if number >= 0:
                        results.setdefault((domain, concurrency, arm.name), []).append(block)
            print_cell(options, results, domain, concurrency)
    for engine in boots.values():
        engine.close()
    return 0


def print_cell(
    options: Options, results: dict[tuple[str, int, str], list[Block]], domain: str, concurrency: int
) -> None:
    base = results[domain, concurrency, options.arms[0]]
    for arm in options.arms:
        blocks = results[domain, concurrency, arm]
        ratios = sorted(b.tokens_per_s / a.tokens_per_s for a, b in zip(base, blocks, strict=True))
        row = {
            "domain": Path(domain).stem,
            "concurrency": concurrency,
            "arm": arm,
            "tokens_per_s": round(median(b.tokens_per_s for b in blocks), 1),
            "ratio": round(median(ratios), 3),
            "ratio_min": round(ratios[0], 3),
            "ratio_max": round(ratios[-1], 3),
            "accept_len": round(median(b.accept_len for b in blocks), 2),
        }
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['domain']:>14} C={concurrency:<3} {arm:>14} {row['tokens_per_s']:8.1f} tok/s  "
                f"x{row['ratio']:.3f} [{row['ratio_min']:.3f}, {row['ratio_max']:.3f}]  accept {row['accept_len']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
