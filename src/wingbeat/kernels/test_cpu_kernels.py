"""The cpu backend against the torch reference, and its promise: a row's bits do not depend on the other rows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.dispatch import kernel_factory
from wingbeat.kernels.interface import DecoderStack, LayerWeights, StackShape
from wingbeat.kernels.torch_kernels import rms_norm

BF16, I32 = torch.bfloat16, torch.int32
CPU = torch.device("cpu")
SHAPES = {
    "gqa3": StackShape(
        num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=80,
        rms_norm_eps=1e-5, input_size=96,
    ),
    "wide_heads": StackShape(
        num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=128, intermediate_size=176,
        rms_norm_eps=1e-6, input_size=64,
    ),
    "drafter": StackShape(
        num_layers=1, hidden_size=64, num_heads=5, num_kv_heads=5, head_dim=64, intermediate_size=48,
        rms_norm_eps=1e-6, input_size=128,
    ),
}  # fmt: skip


def weights(shape: StackShape, seed: int, *, bias: bool = False, head_norms: bool = False) -> list[LayerWeights]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inner: int) -> Tensor:
        return (torch.randn(outputs, inner, generator=generator) * inner**-0.5).to(BF16)

    def near_one(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(BF16)

    s, heads = shape, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return [
        LayerWeights(
            input_norm=near_one(s.hidden_size) if s.input_size == s.hidden_size else None,
            qkv=matrix(heads, s.input_size),
            qkv_bias=matrix(heads, 4).sum(1) if bias else None,
            q_norm=near_one(s.head_dim) if head_norms else None,
            k_norm=near_one(s.head_dim) if head_norms else None,
            o=matrix(s.hidden_size, s.num_heads * s.head_dim),
            post_norm=near_one(s.hidden_size),
            gate_up=matrix(2 * s.intermediate_size, s.hidden_size),
            down=matrix(s.hidden_size, s.intermediate_size),
        )
        for _ in range(s.num_layers)
    ]


def rope(head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(2048)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos(), angles.sin()


def in_float32(layers: list[LayerWeights]) -> list[LayerWeights]:
    def wide(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.float()

    return [LayerWeights(**{name: wide(getattr(la, name)) for name in LayerWeights.__slots__}) for la in layers]


def stacks(name: str, **kinds: bool) -> tuple[DecoderStack, DecoderStack]:
    """The cpu stack, and the torch stack of the same weights in float32."""
    shape = SHAPES[name]
    layers = weights(shape, 1, **kinds)
    exact = kernel_factory(CPU, torch.float32, 1, "torch").stack(shape, in_float32(layers), rope(shape.head_dim))
    return kernel_factory(CPU, BF16, 2, "cpu").stack(shape, layers, rope(shape.head_dim)), exact


@dataclass(frozen=True, slots=True)
class Seq:
    """One sequence of a batch: committed entries, earlier in-flight rows, rows now, tree or causal."""

    context: int
    earlier: int
    rows: int
    tree: bool


def ancestors(num_keys: int, generator: torch.Generator) -> Tensor:
    """[keys, keys] bool: each node sees itself and the path to its random parent; node 0 is the root."""
    mask = torch.eye(num_keys, dtype=torch.bool)
    for i in range(1, num_keys):
        mask[i] |= mask[int(torch.randint(i, (1,), generator=generator))]
    return mask


def make_batch(seqs: list[Seq], page_size: int, context_start: int, seed: int, *, masks: bool = True) -> ForwardBatch:
    generator = torch.Generator().manual_seed(seed)
    pages = max(1, max(-(-s.context // page_size) for s in seqs))
    key_lens = torch.tensor([s.earlier + s.rows for s in seqs], dtype=I32)
    key_starts = (key_lens.cumsum(0) - key_lens).to(I32) + 3
    width, rows = int(key_lens.max()), [s.rows for s in seqs]
    mask = torch.ones(sum(rows), width, dtype=torch.bool)  # causal sequences must ignore what stands here
    slots, first = [], 0
    for b, s in enumerate(seqs):
        if s.tree:
            mask[first : first + s.rows, : s.earlier + s.rows] = ancestors(s.earlier + s.rows, generator)[s.earlier :]
        slots.append(key_starts[b] + s.earlier + torch.arange(s.rows))
        first += s.rows
    return ForwardBatch(
        input_ids=torch.zeros(first, dtype=torch.int64),
        positions=torch.cat([s.context + s.earlier + torch.arange(s.rows) for s in seqs]),
        cu_rows=torch.tensor([0, *itertools.accumulate(rows)], dtype=I32),
        key_starts=key_starts,
        key_lens=key_lens,
        scratch_slots=torch.cat(slots).to(torch.int64),
        context_lens=torch.tensor([s.context for s in seqs], dtype=I32),
        page_table=torch.randperm(len(seqs) * pages, generator=generator).to(I32).view(len(seqs), pages),
        page_size=page_size,
        context_start=context_start,
        causal=torch.tensor([not s.tree for s in seqs]) if masks else None,
        mask=mask if masks else None,
    )


def make_pool(shape: StackShape, batch: ForwardBatch, seed: int) -> KVPool:
    """Random entries where a row may look, NaN everywhere else."""
    pool = KVPool.allocate(
        num_layers=shape.num_layers, num_slots=batch.page_table.numel() * batch.page_size,
        num_scratch_rows=int((batch.key_starts + batch.key_lens).max()) + 5, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, dtype=BF16, device=CPU,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for region in (pool.k, pool.v, pool.scratch_k, pool.scratch_v):
        region.fill_(float("nan"))
    for b in range(batch.num_seqs):
        where = torch.arange(batch.context_start, int(batch.context_lens[b]))
        slots = batch.page_table[b].long()[where // batch.page_size] * batch.page_size + where % batch.page_size
        start = int(batch.key_starts[b])
        flying = torch.arange(start, start + int(batch.key_lens[b]))
        for region, place in ((pool.k, slots), (pool.v, slots), (pool.scratch_k, flying), (pool.scratch_v, flying)):
            size = (region.shape[0], len(place), *region.shape[2:])
            region[:, place] = torch.randn(size, generator=generator).to(BF16)
    return pool


def in_float(pool: KVPool) -> KVPool:
    return KVPool(pool.k.float(), pool.v.float(), pool.scratch_k.float(), pool.scratch_v.float())


def run(stack: DecoderStack, batch: ForwardBatch, pool: KVPool, shape: StackShape, dtype: torch.dtype) -> list[Tensor]:
    """Residual, aux of every layer, and the pool's scratch of a forward on fixed random rows."""
    generator = torch.Generator().manual_seed(9)
    residual = torch.randn(batch.num_rows, shape.hidden_size, generator=generator).to(BF16).to(dtype)
    first = torch.randn(batch.num_rows, shape.input_size, generator=generator).to(BF16).to(dtype)
    first_input = first if shape.input_size != shape.hidden_size else None
    capture = (0, shape.num_layers)
    out, aux = stack.forward(residual, batch, pool, first_input=first_input, capture=capture)
    assert aux is not None
    return [out, aux, pool.scratch_k[:, batch.scratch_slots], pool.scratch_v[:, batch.scratch_slots]]


def assert_near(mine: Tensor, exact: Tensor, tolerance: float = 0.03) -> None:
    """Within a few bf16 roundings of the tensor's own size; NaN anywhere fails."""
    error = (mine.double() - exact.double()).abs().max() / exact.abs().max()
    assert error < tolerance, f"relative error {error:.4f}"


BATCHES = {
    "decode": [Seq(37, 0, 1, False), Seq(5, 0, 1, False), Seq(64, 0, 1, False)],
    "ragged": [Seq(7, 0, 4, True), Seq(130, 0, 1, False), Seq(18, 3, 5, True), Seq(1, 0, 21, False)],
    "prefill": [Seq(1, 0, 70, False), Seq(33, 0, 40, False)],
    "draft_level": [Seq(20, 6, 4, True), Seq(21, 2, 4, True)],
    "chain": [Seq(50, 0, 6, False), Seq(3, 2, 3, False)],
}


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize(("page_size", "context_start"), [(1, 0), (4, 1), (16, 1)])
def test_stack_matches_reference(shape_name: str, batch_name: str, page_size: int, context_start: int) -> None:
    shape = SHAPES[shape_name]
    mine, exact = stacks(shape_name, bias=page_size == 1, head_norms=page_size == 4)
    batch = make_batch(BATCHES[batch_name], page_size, context_start, seed=page_size)
    pool = make_pool(shape, batch, 4)
    wide_pool = in_float(pool)
    for got, want in zip(
        run(mine, batch, pool, shape, BF16), run(exact, batch, wide_pool, shape, torch.float32), strict=True
    ):
        assert got.dtype == BF16
        assert_near(got, want)


def test_no_mask_means_causal() -> None:
    shape = SHAPES["gqa3"]
    mine, _ = stacks("gqa3")
    seqs = [Seq(9, 0, 5, False), Seq(12, 0, 2, False)]
    outs = []
    for masks in (True, False):
        batch = make_batch(seqs, 4, 0, 3, masks=masks)
        outs.append(run(mine, batch, make_pool(shape, batch, 4), shape, BF16)[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("copies", [2, 4, 5, 8, 33])
def test_a_row_does_not_depend_on_its_neighbours(copies: int) -> None:
    """One sequence alone and among others: the same bits."""
    shape = SHAPES["gqa3"]
    mine, _ = stacks("gqa3", bias=True, head_norms=True)
    alone = make_batch([Seq(77, 0, 1, False)], 4, 0, 3)
    pool = make_pool(shape, alone, 4)
    entries = (pool.k[:, context_slots(alone, 0)], pool.v[:, context_slots(alone, 0)])
    residual = torch.randn(1, shape.hidden_size, generator=torch.Generator().manual_seed(2)).to(BF16)
    want, _ = mine.forward(residual, alone, pool)
    others = [Seq(10 + 3 * i, 0, 1 + i % 3, i % 2 == 1) for i in range(copies - 1)]
    for place in (0, copies - 1):
        seqs = [*others[:place], Seq(77, 0, 1, False), *others[place:]]
        batch = make_batch(seqs, 4, 0, 3)
        pool = make_pool(shape, batch, 5)
        pool.k[:, context_slots(batch, place)], pool.v[:, context_slots(batch, place)] = entries
        rows = torch.randn(batch.num_rows, shape.hidden_size).to(BF16)
        row = int(batch.cu_rows[place])
        rows[row] = residual[0]
        got, _ = mine.forward(rows, batch, pool)
        assert torch.equal(got[row], want[0])


def context_slots(batch: ForwardBatch, seq: int) -> Tensor:
    where = torch.arange(batch.context_start, int(batch.context_lens[seq]))
    return batch.page_table[seq].long()[where // batch.page_size] * batch.page_size + where % batch.page_size


@pytest.mark.parametrize("shape_name", ["gqa3", "wide_heads"])
@pytest.mark.parametrize("chunks", [(40,), (16, 16, 8), (1, 38, 1), (7, 20, 13), (1,) * 40])
def test_prefill_in_any_chunks_gives_the_same_bits(shape_name: str, chunks: tuple[int, ...]) -> None:
    """Tokens as one prefill, in chunks, or one by one through the pages: rows and K/V are bitwise equal."""
    shape, total = SHAPES[shape_name], 40
    mine, _ = stacks(shape_name, bias=True)
    tokens = torch.randn(total, shape.hidden_size, generator=torch.Generator().manual_seed(2)).to(BF16)
    results = []
    for plan in ((total,), chunks):
        pool = KVPool.allocate(
            num_layers=shape.num_layers, num_slots=total, num_scratch_rows=total, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, dtype=BF16, device=CPU,
        )  # fmt: skip
        done, outs = 0, []
        for size in plan:
            batch = one_chunk(done, size, total)
            outs.append(mine.forward(tokens[done : done + size], batch, pool)[0])
            pool.commit(torch.arange(size), torch.arange(done, done + size))
            done += size
        results.append((torch.cat(outs), pool.k.clone(), pool.v.clone()))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def one_chunk(context: int, rows: int, slots: int) -> ForwardBatch:
    """Causal rows of one sequence whose page i holds positions 4i..4i+3."""
    return ForwardBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64), positions=context + torch.arange(rows),
        cu_rows=torch.tensor([0, rows], dtype=I32), key_starts=torch.zeros(1, dtype=I32),
        key_lens=torch.tensor([rows], dtype=I32), scratch_slots=torch.arange(rows),
        context_lens=torch.tensor([context], dtype=I32), page_table=torch.arange(-(-slots // 4), dtype=I32)[None],
        page_size=4,
    )  # fmt: skip


def test_a_tree_path_gives_the_bits_of_plain_decoding() -> None:
    """Nodes a - b and a - c: the rows of a and c equal those of the chain a, c, whatever b holds."""
    shape = SHAPES["gqa3"]
    mine, _ = stacks("gqa3")
    rows = torch.randn(3, shape.hidden_size, generator=torch.Generator().manual_seed(2)).to(BF16)
    chain, tree = one_chunk(21, 2, 24), one_chunk(21, 3, 24)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    tree = replace(tree, positions=torch.tensor([21, 22, 22]), causal=torch.tensor([False]), mask=mask)
    pool = make_pool(shape, replace(chain, key_lens=torch.tensor([3], dtype=I32)), 4)
    want, _ = mine.forward(rows[[0, 2]], chain, pool)
    pool.scratch_v.fill_(float("nan"))
    got, _ = mine.forward(rows, tree, pool)
    assert torch.equal(got[[0, 2]], want)


@pytest.mark.parametrize("context", [255, 256, 257, 511, 700, 1023])
def test_long_context_gives_the_same_bits_however_it_is_split(context: int) -> None:
    """The last of three rows in flight, and the same row after the two before it were committed."""
    shape = SHAPES["gqa3"]
    mine, exact = stacks("gqa3")
    rows = torch.randn(3, shape.hidden_size, generator=torch.Generator().manual_seed(2)).to(BF16)
    batch = one_chunk(context, 3, context + 8)
    pool = make_pool(shape, batch, 4)
    wide_pool = in_float(pool)
    want, _ = mine.forward(rows, batch, pool)
    assert_near(want, exact.forward(rows.float(), batch, wide_pool)[0])
    pool.commit(torch.tensor([0, 1]), torch.tensor([context, context + 1]))
    got, _ = mine.forward(rows[2:], one_chunk(context + 2, 1, context + 8), pool)
    assert torch.equal(got[0], want[2])


@pytest.mark.parametrize(("outputs", "inner"), [(16, 2), (1, 1), (40, 33), (96, 64), (257, 100)])
def test_linear_and_head(outputs: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inner, generator=generator).to(BF16)
    norm = torch.rand(inner).to(BF16) + 0.5
    kernels = kernel_factory(CPU, BF16, 2, "cpu")
    linear, head = kernels.linear(weight), kernels.head(norm, 1e-5, weight)
    x = torch.randn(33, inner, generator=generator).to(BF16)
    everything, logits = linear(x), head(x)
    assert everything.dtype == BF16 and logits.dtype == torch.float32 and logits.is_contiguous()
    assert_near(everything, x.double() @ weight.double().T, 0.01)
    assert_near(logits, rms_norm(x.double(), norm.double(), 1e-5) @ weight.double().T, 0.01)
    for count in (0, 1, 2, 3, 4, 5, 8, 9, 17):
        assert torch.equal(linear(x[33 - count :]), everything[33 - count :])
        assert torch.equal(head(x[33 - count :]), logits[33 - count :])


def test_results_survive_the_next_call() -> None:
    """Outputs are the caller's: a later forward does not write into them."""
    shape = SHAPES["gqa3"]
    mine, _ = stacks("gqa3")
    batch = make_batch(BATCHES["chain"], 4, 0, 3)
    first = run(mine, batch, make_pool(shape, batch, 4), shape, BF16)
    kept = [t.clone() for t in first]
    run(mine, batch, make_pool(shape, batch, 5), shape, BF16)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@pytest.mark.slow
def test_generic_path_passes_the_same_tests() -> None:
    """CPUs without vdpbf16ps: this file again, with the instruction switched off."""
    if os.environ.get("WINGBEAT_NO_BF16_DOT"):
        pytest.skip("already on the generic path")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "WINGBEAT_NO_BF16_DOT": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:]
