"""The cpu kernels beside torch's, in one run: products, attention against reading its bytes, the whole stack.

    python benchmarks/kernels.py [--threads 2] [--repeats 9]

Shapes are SmolLM2-135M's with random weights. Both sides of a line take turns in every repeat, so a busy machine slows
both; times are medians in ms with the quartiles' distance, and the ratio is the median of the repeats' ratios.
Exits 3 when decode attention takes more than 4.5 times as long as reading its keys and values once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.dispatch import kernel_factory
from wingbeat.kernels.interface import KernelFactory, LayerWeights, StackShape

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPE = StackShape(
    num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, input_size=576,
)  # fmt: skip
VOCAB = 49152
LIMIT = 4.5


def times_ms(sides: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Times of each side, taken in turns after one untimed round."""
    for side in sides:
        side()
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, times in zip(sides, taken, strict=True):
            start = perf_counter()
            side()
            times.append((perf_counter() - start) * 1e3)
    return taken


def ratio(first: list[float], second: list[float]) -> float:
    return median(a / b for a, b in zip(first, second, strict=True))


def cell(times: list[float]) -> str:
    low, _, high = quantiles(times, n=4)
    return f"{median(times):8.2f} +-{high - low:6.2f}"


def line(label: str, names: tuple[str, str], taken: list[list[float]]) -> None:
    first, second = taken
    print(f"{label:28} {names[0]} {cell(first)}   {names[1]} {cell(second)}   ratio {ratio(first, second):6.3f}")


def matrix(outputs: int, inner: int) -> Tensor:
    return torch.randn(outputs, inner).mul(inner**-0.5).to(BF16)


def random_layers() -> list[LayerWeights]:
    s = SHAPE
    ones = torch.ones(s.hidden_size, dtype=BF16)
    return [
        LayerWeights(
            input_norm=ones, qkv=matrix((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden_size),
            qkv_bias=None, q_norm=None, k_norm=None, o=matrix(s.hidden_size, s.num_heads * s.head_dim),
            post_norm=ones, gate_up=matrix(2 * s.intermediate_size, s.hidden_size),
            down=matrix(s.hidden_size, s.intermediate_size),
        )
        for _ in range(s.num_layers)
    ]  # fmt: skip


def decode_batch(num_seqs: int, rows: int, context: int, page_size: int = 16) -> tuple[ForwardBatch, KVPool]:
    """`rows` causal rows of each sequence over `context` committed entries in shuffled pages."""
    pages = max(1, -(-context // page_size))
    pool = KVPool.allocate(
        num_layers=SHAPE.num_layers, num_slots=num_seqs * pages * page_size, num_scratch_rows=num_seqs * rows,
        num_kv_heads=SHAPE.num_kv_heads, head_dim=SHAPE.head_dim, dtype=BF16, device=CPU,
    )  # fmt: skip
    pool.k.normal_()
    pool.v.normal_()
    per_seq = torch.arange(num_seqs, dtype=torch.int32)
    batch = ForwardBatch(
        input_ids=torch.zeros(num_seqs * rows, dtype=torch.int64),
        positions=(context + torch.arange(rows)).repeat(num_seqs),
        cu_rows=torch.arange(num_seqs + 1, dtype=torch.int32) * rows, key_starts=per_seq * rows,
        key_lens=torch.full_like(per_seq, rows), scratch_slots=torch.arange(num_seqs * rows),
        context_lens=torch.full_like(per_seq, context),
        page_table=torch.randperm(num_seqs * pages).to(torch.int32).view(num_seqs, pages), page_size=page_size,
    )  # fmt: skip
    return batch, pool


def rope() -> tuple[Tensor, Tensor]:
    dim = SHAPE.head_dim
    angles = torch.arange(4096)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return angles.cos(), angles.sin()


def linears(mine: KernelFactory, layers: list[LayerWeights], repeats: int) -> None:
    """All linears of the layers and the head, against F.linear on the same weights."""
    weights = [w for la in layers for w in (la.qkv, la.o, la.gate_up, la.down)] + [matrix(VOCAB, SHAPE.hidden_size)]
    packed = [mine.linear(weight) for weight in weights]
    print("\nlinears of 30 layers and the head")
    for rows in (1, 4, 8, 16, 32, 64, 128):
        inputs = {size: torch.randn(rows, size).to(BF16) for size in {w.shape[1] for w in weights}}
        taken = times_ms(
            [
                lambda: [linear(inputs[w.shape[1]]) for linear, w in zip(packed, weights, strict=True)],  # noqa: B023
                lambda: [F.linear(inputs[w.shape[1]], w) for w in weights],  # noqa: B023
            ],
            repeats,
        )
        line(f"  M={rows}", ("cpu", "torch"), taken)


def stacks(mine: KernelFactory, torch_kernels: KernelFactory, layers: list[LayerWeights], repeats: int) -> None:
    """One forward of the layers at 64 committed entries, against the torch backend."""
    ours, reference = (k.stack(SHAPE, layers, rope()) for k in (mine, torch_kernels))
    print("\nwhole stack, 64 entries of context")
    for num_seqs, rows in ((1, 1), (1, 4), (4, 1), (32, 1), (1, 128)):
        batch, pool = decode_batch(num_seqs, rows, 64)
        residual = torch.randn(batch.num_rows, SHAPE.hidden_size).to(BF16)
        sides = [lambda s=s: s.forward(residual, batch, pool) for s in (ours, reference)]  # noqa: B023
        line(f"  {num_seqs} sequences x {rows} rows", ("cpu", "torch"), times_ms(sides, repeats))


def attention(mine: KernelFactory, layers: list[LayerWeights], repeats: int) -> bool:
    """32 x 512 decode attention (a forward with context minus one without) against summing the same bytes."""
    stack = mine.stack(SHAPE, layers, rope())
    long, short = decode_batch(32, 1, 512), decode_batch(32, 1, 0)
    residual = torch.randn(32, SHAPE.hidden_size).to(BF16)
    regions = [region.view(torch.float32) for region in (long[1].k, long[1].v)]  # the sum is as fast as memory
    with_context, without, reading = times_ms(
        [
            lambda: stack.forward(residual, *long),
            lambda: stack.forward(residual, *short),
            lambda: [region.sum() for region in regions],
        ],
        repeats,
    )
    spent = [a - b for a, b in zip(with_context, without, strict=True)]
    print(f"\nattention, 32 sequences x 512 entries, {sum(r.nbytes for r in regions) / 1e6:.0f} MB of K/V")
    line("  1 row per sequence", ("cpu", "read"), [spent, reading])
    passed = ratio(spent, reading) <= LIMIT
    print(f"  at most {LIMIT} x reading: {'pass' if passed else 'FAIL'}")
    return passed


def listening(mine: KernelFactory, layers: list[LayerWeights], repeats: int) -> None:
    hidden, num_rows = SHAPE.hidden_size, 32
    batch, pool = decode_batch(8, 4, 64)
    stack = mine.stack(SHAPE, layers, rope())
    layer = replace(layers[0], input_norm=None, qkv=matrix(layers[0].qkv.shape[0], 2 * hidden))
    ones = torch.ones(hidden, dtype=BF16)
    joined = mine.draft_input(matrix(VOCAB, hidden), ones, ones, 1e-5)
    one_layer = mine.stack(replace(SHAPE, num_layers=1, input_size=2 * hidden), [layer], rope())
    listen = mine.listen(mine.linear(matrix(hidden, 3 * hidden)), joined, one_layer)
    at = torch.arange(num_rows)
    rows = CommittedRows(at, at, at, at, at, at, torch.full((num_rows,), -1))
    carried = CarriedFeatures(torch.zeros(num_rows, hidden, dtype=BF16), torch.zeros(num_rows, hidden, dtype=BF16), 16)
    aux, residual = torch.randn(num_rows, 3 * hidden).to(BF16), torch.randn(num_rows, hidden).to(BF16)
    print("\nlistening (fused features, K/V of the drafter's layer), 32 rows, against the target's forward of them")
    sides = [lambda: listen(aux, rows, carried, pool), lambda: stack.forward(residual, batch, pool)]
    line("  32 rows", ("listen", "forward"), times_ms(sides, repeats))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    mine, reference = (kernel_factory(CPU, BF16, options.threads, name) for name in ("cpu", "torch"))
    layers = random_layers()
    with torch.inference_mode():
        linears(mine, layers, options.repeats)
        stacks(mine, reference, layers, options.repeats)
        listening(mine, layers, options.repeats)
        passed = attention(mine, layers, options.repeats)
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
