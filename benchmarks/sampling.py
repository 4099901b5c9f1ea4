"""Time of sampling and of drafting guesses, against a sort of the whole vocabulary (the usual torch way).

    python benchmarks/sampling.py [--threads 2] [--repeats 15]

Both ways take turns on the same logits; medians and their ratio are printed. Logits are random but shaped like a
language model's: a broad body with a few likely tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numba
import torch
from torch import Tensor

from wingbeat.kernels.noise import noise_key
from wingbeat.kernels.sampling import SamplingBatch, SamplingRows, sampler_for

VOCAB, DRAFT_VOCAB = 49152, 16384
SHAPES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "T 0.7": (0.7, 0, 1.0, 0.0),
    "T 0.7 top_p 0.95": (0.7, 0, 0.95, 0.0),
    "T 1 top_k 50": (1.0, 50, 1.0, 0.0),
    "T 1 all three": (1.0, 50, 0.9, 0.02),
}
"""temperature, top_k, top_p, min_p"""


def make_batch(num: int, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingBatch:
    """Equal settings for `num` sequences with 64 tokens of history."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num,), value, dtype=dtype)

    return SamplingBatch(
        temperature=full(temperature),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p),
        min_p=full(min_p),
        presence_penalty=full(0.0),
        frequency_penalty=full(0.0),
        repetition_penalty=full(1.0),
        noise_key=torch.tensor([noise_key(seed, 0) for seed in range(num)]),
        history=torch.randint(0, VOCAB, (num, 64), dtype=torch.int32),
        history_lens=full(64, torch.int32),
        prompt_lens=full(32, torch.int32),
        min_tokens=full(0, torch.int32),
        stop_ids=torch.zeros((num, 1), dtype=torch.int32),
        bias_ids=torch.full((num, 1), -1, dtype=torch.int32),
        bias_values=torch.zeros((num, 1)),
    )


def make_logits(num: int, size: int) -> Tensor:
    """[num, size] float32: normal body, and 40 tokens a few nats above it as a model's likely continuations are."""
    logits = 2.0 * torch.randn(num, size)
    likely = torch.randint(0, size, (num, 40))
    return logits.scatter(1, likely, 10.0 + 2.5 * torch.randn(num, 40))


def sorted_sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The usual way: sort the vocabulary, cut, softmax, draw."""
    if float(batch.temperature[0]) == 0:
        return logits.argmax(1)
    scaled = logits / batch.temperature[:, None]
    top_k, top_p, min_p = int(batch.top_k[0]), float(batch.top_p[0]), float(batch.min_p[0])
    if not top_k and top_p == 1.0 and not min_p:
        return torch.multinomial(scaled.softmax(1), 1)[:, 0]
    values, ids = scaled.sort(1, descending=True)
    prob = values.softmax(1)
    prob = prob * (prob >= min_p * prob[:, :1])
    if top_k:
        prob[:, top_k:] = 0.0
    prob = prob / prob.sum(1, keepdim=True)
    prob = prob * (prob.cumsum(1) - prob < top_p)
    return ids.gather(1, torch.multinomial(prob, 1))[:, 0]


def interleave(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median milliseconds of each, measured in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for way, spent in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            way()
            spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, rows: int, ours: float, theirs: float) -> None:
    print(f"{name:20s} {rows:4d} rows   {ours:8.3f} ms   sort {theirs:8.3f} ms   ratio {theirs / ours:6.1f}")


def bench_sample(rows: int, repeats: int) -> None:
    """Each shape at `rows` rows of the target's vocabulary. Our scratch copy of the logits is not counted."""
    sampler = sampler_for("cpu", torch.float32)
    which = SamplingRows(
        seq=torch.arange(rows, dtype=torch.int32), ancestors=torch.full((rows, 1), -1, dtype=torch.int32)
    )
    source = make_logits(rows, VOCAB)
    for name, shape in SHAPES.items():
        batch = make_batch(rows, *shape)
        copies = iter([source.clone() for _ in range(repeats + 1)])
        sampler.sample(next(copies), batch, which)
        ours, theirs = interleave(
            lambda c=copies, b=batch: sampler.sample(next(c), b, which),  # type: ignore[misc]
            lambda b=batch: sorted_sample(source, b),  # type: ignore[misc]
            repeats,
        )
        report(name, rows, ours, theirs)


def bench_propose(rows: int, repeats: int) -> None:
    """Four guesses a row of the draft vocabulary, against torch.topk of the logits alone."""
    sampler = sampler_for("cpu", torch.float32)
    logits, ids = make_logits(rows, DRAFT_VOCAB), torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    seq, positions = torch.arange(rows, dtype=torch.int32), torch.full((rows,), 65)
    for temperature in (0.0, 0.7):
        batch = make_batch(rows, temperature, 0, 0.95, 0.0)

        def ours(batch: SamplingBatch = batch) -> object:
            return sampler.propose_topk(logits, ids, batch, seq, positions, 4)

        ours()
        report(f"propose T {temperature}", rows, *interleave(ours, lambda: logits.softmax(1).topk(4), repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    torch.manual_seed(0)
    for rows in (1, 8, 32):
        bench_sample(rows, options.repeats)
    for rows in (1, 32, 128):
        bench_propose(rows, options.repeats)


if __name__ == "__main__":
    main()
