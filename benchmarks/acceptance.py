"""A drafter's acceptance by domain: accept_len and conditional acceptance by position, greedy.

    python benchmarks/acceptance.py --prompts coding agentic encyclopedic --plan chain(3)

Compare with the table in the drafter's card, which was measured the same way: 256 tokens or the end of the answer, all
prompts of a set, accept_len = committed tokens over target forwards, the forward that ends a prefill not counted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from wingbeat.engine.config import EngineConfig
from wingbeat.engine.engine import Engine
from wingbeat.types import Request, SamplingParams

SUITES = Path(__file__).parents[1] / "src/wingbeat/lab/suites/data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    prompts: tuple[str, ...] = ("coding", "agentic", "encyclopedic")
    """Shipped suites, or paths of JSONL files with `messages`."""
    plan: str = "chain(3)"
    max_tokens: int = 256
    concurrency: int = 16
    model: str = "smollm2"
    speculative_model: str = "auto"


def read_prompts(name: str, engine: Engine) -> list[tuple[int, ...]]:
    path = Path(name) if name.endswith(".jsonl") else SUITES / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(engine.encode_chat(row["messages"])) for row in rows]


def measure(engine: Engine, prompts: list[tuple[int, ...]], options: Options) -> tuple[float, list[float], int]:
    """accept_len, conditional acceptance by position, committed tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    waiting = [Request(request_id=str(i), prompt_token_ids=p, params=params) for i, p in enumerate(prompts)]
    running = tokens = forwards = 0
    drafted, accepted = [0] * 16, [0] * 16
    while waiting or engine.has_work():
        while waiting and running < options.concurrency:
            engine.add(waiting.pop(0))
            running += 1
        for delta in engine.step():
            tokens += len(delta.token_ids)
            if delta.stats is not None:
                running -= 1
                tokens -= 1  # the prefill's own token
                forwards += delta.stats.num_target_forwards - 1
                for counts, seen in ((drafted, delta.stats.drafted_per_pos), (accepted, delta.stats.accepted_per_pos)):
                    for position, count in enumerate(seen):
                        counts[position] += count
    max_depth = sum(count > 0 for count in drafted)
    reached = [drafted[0], *accepted]
    alphas = [hit / tried for hit, tried in zip(accepted, reached, strict=False) if tried][:max_depth]
    return tokens / max(forwards, 1), alphas, tokens


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    engine = Engine.from_config(
        EngineConfig(model=options.model, speculative_model=options.speculative_model, policy=f"always:{options.plan}")
    )
    print(f"{options.plan}, greedy, {options.max_tokens} tokens")
    for name in options.prompts:
        accept_len, alphas, tokens = measure(engine, read_prompts(name, engine), options)
        shown = " ".join(f"{alpha:.3f}" for alpha in alphas)
        print(f"{Path(name).stem:>14}  accept_len {accept_len:.2f}  by position {shown}  ({tokens} tokens)", flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
