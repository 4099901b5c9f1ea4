"""Plain decoding beside the peers on one machine: transformers in process, vLLM over HTTP.

    python benchmarks/peers.py                          transformers' greedy generate against our engine, one stream
    python benchmarks/peers.py --vllm VENV/bin/vllm     also vLLM's server against ours, interleaved by block

All run the embedded SmolLM2-135M in bfloat16 without speculation, greedy, to the full length (ignore_eos).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx
import torch
import tyro
from transformers import AutoModelForCausalLM

from wingbeat.engine.llm import LLM
from wingbeat.models.resolve import resolve_model
from wingbeat.types import SamplingParams

SUITE = Path(__file__).parents[1] / "src/wingbeat/lab/suites/data/coding.jsonl"
START_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    vllm: Path | None = None
    """The vllm executable of an environment of its own."""
    concurrency: tuple[int, ...] = (1, 8, 32)
    blocks: int = 3
    max_tokens: int = 96
    ports: tuple[int, int] = (8123, 8124)


def beside_transformers(options: Options) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"transformers": [], "wingbeat": []}
    with closing(LLM("smollm2", speculative_model="none")) as llm:

        def ours(ids: list[int]) -> None:
            llm.generate([ids], params)

        def theirs(ids: list[int]) -> None:
            with torch.inference_mode():
                model.generate(
                    torch.tensor([ids]), do_sample=False, max_new_tokens=options.max_tokens,
                    min_new_tokens=options.max_tokens, pad_token_id=0,
                )  # fmt: skip

        prompts = [llm.engine.encode_chat(json.loads(row)["messages"]) for row in SUITE.read_text().splitlines()]
        for number, ids in enumerate(prompts[: 3 * options.blocks + 1]):
            for name, run in (("transformers", theirs), ("wingbeat", ours))[:: 1 if number % 2 else -1]:
                started = perf_counter()
                run(list(ids))
                if number:  # the first prompt warms up
                    rates[name].append(options.max_tokens / (perf_counter() - started))
    ratios = sorted(b / a for a, b in zip(rates["transformers"], rates["wingbeat"], strict=True))
    print(
        f"transformers generate {median(rates['transformers']):6.1f} tok/s, wingbeat {median(rates['wingbeat']):6.1f}"
    )
    print(f"wingbeat x{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] over {len(ratios)} prompts, C=1")


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Runs a server until the block ends; its URL once /health answers."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | quiet)
    url, deadline = f"http://127.0.0.1:{port}", perf_counter() + START_LIMIT_S
    try:
        while not healthy(url):
            if server.poll() is not None or perf_counter() > deadline:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            sleep(1.0)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def beside_vllm(options: Options, vllm: Path) -> int:
    theirs, ours = options.ports
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        serve_theirs = [
            str(vllm),
            "serve",
            str(resolve_model("smollm2")),
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "2048",
        ]
        serve_ours = [sys.executable, "-m", "wingbeat", "serve", "--speculative-model", "none"]
        with (
            serving([*serve_theirs, "--host", "127.0.0.1", "--port", str(theirs)], theirs, folder / "vllm.log") as a,
            serving([*serve_ours, "--port", str(ours)], ours, folder / "wingbeat.log") as b,
        ):
            levels = [str(level) for level in options.concurrency]
            bench = [sys.executable, "-m", "wingbeat", "bench", "parallel", "--arms", f"vllm={a}", f"wingbeat={b}"]
            bench += ["--suite", "coding", "--concurrency", *levels, "--blocks", str(options.blocks), "--ignore-eos"]
            bench += ["--max-tokens", str(options.max_tokens), "--prefix-cache", "salted", "--out", str(folder / "run")]
            return subprocess.run(bench, check=False).returncode


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    beside_transformers(options)
    return beside_vllm(options, options.vllm) if options.vllm else 0


if __name__ == "__main__":
    sys.exit(main())
