"""Listening: the cpu backend against torch, and torch against what each row's entry is made of, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.dispatch import kernel_factory
from wingbeat.kernels.interface import KernelFactory, LayerWeights, StackShape

HIDDEN, AUX, VOCAB, LANES, PAGES, PAGE = 64, 96, 50, 6, 12, 4
SHAPE = StackShape(
    num_layers=1, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=48,
    rms_norm_eps=1e-5, input_size=2 * HIDDEN,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heard:
    """What listening leaves behind."""

    k: Tensor
    v: Tensor
    lanes: Tensor
    pages: Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def committed(spans: list[tuple[int, int, int, int]]) -> CommittedRows:
    """spans: (lane, first position, rows, first block row); every second block row of a span is accepted.

    Position p of a lane lies in page 2 * lane + p // PAGE.
    """
    lanes = torch.cat([torch.full((n,), lane) for lane, _, n, _ in spans])
    positions = torch.cat([torch.arange(start, start + n) for _, start, n, _ in spans])
    before = torch.arange(lanes.numel()) - 1
    before[torch.tensor([n for _, _, n, _ in spans]).cumsum(0)[:-1]] = -1
    return CommittedRows(
        block_rows=torch.cat([torch.arange(n) * 2 + row for _, _, n, row in spans]),
        token_ids=(positions * 7 + lanes) % VOCAB,
        slots=(2 * lanes + positions // PAGE) * PAGE + positions % PAGE,
        positions=positions,
        seqs=torch.cat([torch.full((n,), i) for i, (_, _, n, _) in enumerate(spans)]),
        lanes=lanes,
        before=before,
    )


def hear(kernels: KernelFactory, dtype: torch.dtype, *steps: CommittedRows, switches: bool = True) -> Heard:
    """What one step after the other leaves behind; `switches`: bias and head norms."""
    heads = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    layer = LayerWeights(
        input_norm=None,
        qkv=(draw(heads, 2 * HIDDEN, seed=1) * 0.1).to(dtype),
        qkv_bias=draw(heads, seed=2).to(dtype) if switches else None,
        q_norm=draw(32, seed=3).to(dtype) if switches else None,
        k_norm=draw(32, seed=4).to(dtype) if switches else None,
        o=draw(HIDDEN, 128).to(dtype),
        post_norm=draw(HIDDEN).to(dtype),
        gate_up=draw(96, HIDDEN).to(dtype),
        down=draw(HIDDEN, 48).to(dtype),
    )
    angles = torch.arange(64)[:, None] * 1e3 ** (-torch.arange(0, 32, 2) / 32)
    fuse = kernels.linear((draw(HIDDEN, AUX, seed=5) * 0.1).to(dtype))
    embedding = draw(VOCAB, HIDDEN, seed=6).to(dtype)
    joined = kernels.draft_input(embedding, draw(HIDDEN, seed=7).to(dtype), draw(HIDDEN, seed=8).to(dtype), 1e-5)
    listen = kernels.listen(fuse, joined, kernels.stack(SHAPE, [layer], (angles.cos(), angles.sin())))
    pool = KVPool.allocate(
        num_layers=1, num_slots=PAGES * PAGE, num_scratch_rows=1, num_kv_heads=2, head_dim=32, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    carried = CarriedFeatures(draw(LANES, HIDDEN, seed=9).to(dtype), torch.zeros(PAGES, HIDDEN, dtype=dtype), PAGE)
    for rows in steps:
        listen(draw(64, AUX, seed=10).to(dtype), rows, carried, pool)
    return Heard(pool.k[0], pool.v[0], carried.lanes, carried.pages)


SPANS = [
    [(2, 5, 1, 0)],
    [(0, 0, 8, 0), (4, 3, 1, 20), (3, 2, 6, 30)],
    [(lane, lane, 1 + lane % 3, 8 * lane) for lane in range(LANES)],
]


@pytest.mark.parametrize("switches", [False, True])
@pytest.mark.parametrize("spans", SPANS)
def test_backends_hear_the_same(spans: list[tuple[int, int, int, int]], switches: bool) -> None:
    rows, cpu = committed(spans), torch.device("cpu")
    mine = hear(kernel_factory(cpu, torch.bfloat16, 2, "cpu"), torch.bfloat16, rows, switches=switches)
    exact = hear(kernel_factory(cpu, torch.float32, 1, "torch"), torch.float32, rows, switches=switches)
    for name in Heard.__slots__:
        torch.testing.assert_close(getattr(mine, name).float(), getattr(exact, name), atol=0.05, rtol=0.05, msg=name)
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool).index_fill(0, rows.slots, False)
    assert not bool(mine.k[untouched].any()) and bool(mine.k[rows.slots].any(dim=-1).all())


@pytest.mark.parametrize("spans", SPANS)
def test_sequences_do_not_disturb_one_another(spans: list[tuple[int, int, int, int]]) -> None:
    kernels, dtype = kernel_factory(torch.device("cpu"), torch.float64, 1, "torch"), torch.float64
    first, lane = committed(spans[:1]), spans[0][0]
    together, alone = hear(kernels, dtype, committed(spans)), hear(kernels, dtype, first)
    torch.testing.assert_close(together.k[first.slots], alone.k[first.slots])
    torch.testing.assert_close(together.lanes[lane], alone.lanes[lane])
    assert not torch.equal(together.lanes[lane], draw(LANES, HIDDEN, seed=9).double()[lane])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_feature_is_carried_from_step_to_step(backend: str) -> None:
    """The row before is found in this step or carried from the one before: it makes no difference."""
    dtype = torch.float64 if backend == "torch" else torch.bfloat16
    kernels = kernel_factory(torch.device("cpu"), dtype, 2, backend)
    once = hear(kernels, dtype, committed([(1, 0, 8, 0)]))
    twice = hear(kernels, dtype, committed([(1, 0, 5, 0)]), committed([(1, 5, 3, 10)]))
    for name in Heard.__slots__:
        torch.testing.assert_close(getattr(once, name), getattr(twice, name), msg=name)
    assert [page for page in range(PAGES) if bool(once.pages[page].any())] == [2, 3], "full pages keep a feature"
