"""wingbeat generate: one prompt in, text out, with what speculation did."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import perf_counter

from wingbeat.cli.starting import Stages
from wingbeat.engine.config import EngineConfig
from wingbeat.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Answers one prompt in process."""

    prompt: str
    """What the user says; the chat template is applied unless --raw."""
    raw: bool = False
    """Complete the prompt as it stands."""
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    engine: EngineConfig = field(default_factory=EngineConfig)


def run(config: Generate) -> int:
    """Text to stdout, one line of figures to stderr. Exit code 0."""
    from wingbeat.engine.engine import Engine
    from wingbeat.engine.llm import LLM
    from wingbeat.types import SamplingParams

    # Before the model: nobody should wait for it to learn that a temperature is negative.
    params = SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, seed=config.engine.seed
    )
    if not config.prompt:
        raise RequestError("prompt", "", "at least one character")
    with Stages() as tell:
        llm = LLM(engine=Engine.from_config(config.engine, tell))
    started = perf_counter()
    if config.raw:
        outputs = llm.generate(config.prompt, params)
    else:
        outputs = llm.chat([[{"role": "user", "content": config.prompt}]], params)
    seconds = perf_counter() - started
    choice = outputs[0].choices[0]
    print(choice.text)
    stats = choice.stats
    if stats is not None:
        print(
            f"{stats.num_output_tokens} tokens in {seconds:.2f} s ({stats.num_output_tokens / seconds:.1f} tok/s), "
            f"accept_len {stats.num_output_tokens / max(stats.num_target_forwards, 1):.2f}, "
            f"finish {choice.finish_reason}",
            file=sys.stderr,
        )
    llm.close()
    return 0
