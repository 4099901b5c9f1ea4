"""The cpu backend's decoder stack: weights packed once, one compiled call per forward, K/V read in place (Numba).

The residual stream is fp32 inside a forward. Rows are independent of one another bit for bit, so the tokens of greedy
speculation are exactly those of plain decoding here, in bf16 too.

Legend: R rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, L layers.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.cpu_attention import KEY_BLOCK, TILE_BLOCKS, rows_per_task
from wingbeat.kernels.cpu_claims import new_phases
from wingbeat.kernels.cpu_forward import PHASES, run_layers
from wingbeat.kernels.cpu_math import BLOCK, ROW_TILE, aligned, pack
from wingbeat.kernels.interface import LayerWeights, StackShape

NO_MASK = np.zeros((0, 0), np.bool_)
NO_FLAGS = np.zeros(0, np.bool_)


def bits(tensor: Tensor) -> np.ndarray:
    """A bf16 tensor's memory as uint16."""
    return tensor.view(torch.uint16).numpy()


def floats(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy())


def row_columns(size: int, itemsize: int) -> int:
    """At least `size` columns, a row being an odd number of cache lines: neighbouring rows never share a cache set."""
    return (-(-size * itemsize // 64) | 1) * 64 // itemsize


def padded(num_rows: int) -> int:
    return num_rows + ROW_TILE


def _stack_arrays(arrays: list[np.ndarray]) -> np.ndarray:
    return aligned(np.stack(arrays))


def _interleave(gate_up: Tensor) -> Tensor:
    """[2F, H] gate then up -> blocks of 16 in turn, so that one worker holds both halves of a silu."""
    half = gate_up.shape[0] // 2
    blocks = gate_up.view(2, half // BLOCK, BLOCK, -1).transpose(0, 1)
    return blocks.reshape(2 * half, -1)


class _Work:
    """Buffers of one stack for up to `num_rows` rows."""

    def __init__(self, num_rows: int, shape: StackShape, num_workers: int) -> None:
        s, rows = shape, padded(num_rows)
        heads = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        self.num_rows = num_rows
        self.normed = np.zeros((rows, row_columns(max(s.hidden_size, s.input_size), 2)), np.uint16)
        self.wide = np.zeros((rows, row_columns(max(heads, 2 * s.intermediate_size, s.hidden_size), 4)), np.float32)
        q = np.zeros((rows, s.num_heads, s.head_dim), np.uint16)
        mixed = np.zeros((rows, row_columns(s.num_heads * s.head_dim, 2)), np.uint16)
        act = np.zeros((rows, row_columns(s.intermediate_size, 2)), np.uint16)
        self.arrays = (self.normed, self.wide, q, mixed, act)


class _KeyWork:
    """Per-worker buffers of attention for up to `num_keys` visible keys."""

    def __init__(self, num_keys: int, shape: StackShape, num_workers: int) -> None:
        group, width = shape.num_heads // shape.num_kv_heads, num_keys + 2 * KEY_BLOCK
        rows, dim = rows_per_task(group), shape.head_dim
        num_queries = rows * group + ROW_TILE
        self.num_keys = num_keys
        self.arrays = (
            np.zeros((num_workers, width), np.int64),  # key addresses
            np.zeros((num_workers, width), np.int64),  # value addresses
            np.zeros((num_workers, rows, width), np.int64),  # value addresses of rows' own
            np.zeros((num_workers, rows), np.int64),  # keys each row sees
            np.zeros((num_workers, num_queries, dim), np.uint16),  # queries
            aligned(np.zeros((num_workers, TILE_BLOCKS * KEY_BLOCK * dim), np.uint16)),  # packed keys
            np.zeros((num_workers, num_queries, width), np.float32),  # scores
            np.zeros((num_workers, num_queries, width), np.uint16),  # softmax weights
            np.zeros((num_workers, num_queries, dim), np.float32),  # sums
            np.zeros((num_workers, num_queries), np.float32),  # 1 / softmax total
        )


class CpuStack:
    """Implements interface.DecoderStack for bf16 on a CPU; hidden and intermediate in multiples of 16, heads of 32."""

    def __init__(
        self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor], num_workers: int
    ) -> None:
        self._shape, self._workers = shape, num_workers
        none = np.zeros(0, np.float32)

        def rows(tensors: list[Tensor | None]) -> np.ndarray:
            return np.stack([none if t is None else floats(t) for t in tensors])

        qkv = _stack_arrays([pack(layer.qkv) for layer in layers])
        o = _stack_arrays([pack(layer.o) for layer in layers])
        gate_up = _stack_arrays([pack(_interleave(layer.gate_up)) for layer in layers])
        self._weights = (qkv, o, gate_up, _stack_arrays([pack(layer.down) for layer in layers]))
        self._norms = (
            rows([layer.input_norm for layer in layers]),
            rows([layer.post_norm for layer in layers]),
            rows([layer.q_norm for layer in layers]),
            rows([layer.k_norm for layer in layers]),
        )
        self._biases = rows([layer.qkv_bias for layer in layers])
        self._rope = (floats(rope[0]), floats(rope[1]))
        self._work = _Work(16, shape, num_workers)
        self._key_work = _KeyWork(256, shape, num_workers)
        self._eps = np.float32(shape.rms_norm_eps)

    @property
    def kv(self) -> tuple[np.ndarray | np.float32, ...]:
        """What layer 0's K/V entries are made with, as cpu_listen takes it: weight, bias, k norm, eps, cos, sin."""
        first = self._shape.num_heads * self._shape.head_dim
        weight, bias = self._weights[0][0, first // BLOCK :], self._biases[0][first:]
        return weight, bias, self._norms[3][0], self._eps, *self._rope

    def forward(
        self,
        residual: Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        *,
        first_input: Tensor | None = None,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        num_rows, s = batch.num_rows, self._shape
        work, near = self._rows(num_rows), self._keys(int(batch.context_lens.max()) + int(batch.key_lens.max()))
        stream = residual.float().numpy()  # fp32 copy that the layers add to
        if first_input is not None:
            work.normed[:num_rows, : s.input_size] = bits(first_input)
        aux = torch.empty(num_rows, len(capture) * s.hidden_size, dtype=torch.bfloat16)
        run_layers(
            self._workers, new_phases(s.num_layers + 1, PHASES), num_rows, stream, work.arrays, near.arrays, bits(aux),
            np.array(capture, np.int64), first_input is not None, self._weights, self._norms, self._biases, self._rope,
            self._eps, s.num_kv_heads, _pool_bits(pool), (batch.positions.numpy(), batch.scratch_slots.numpy()),
            _geometry(batch),
        )  # fmt: skip
        return torch.from_numpy(stream).to(torch.bfloat16), aux if capture else None

    def _rows(self, num_rows: int) -> _Work:
        if num_rows > self._work.num_rows:
            self._work = _Work(2 * num_rows, self._shape, self._workers)
        return self._work

    def _keys(self, num_keys: int) -> _KeyWork:
        if num_keys > self._key_work.num_keys:
            self._key_work = _KeyWork(2 * num_keys, self._shape, self._workers)
        return self._key_work


def _pool_bits(pool: KVPool) -> tuple[np.ndarray, ...]:
    return bits(pool.k), bits(pool.v), bits(pool.scratch_k), bits(pool.scratch_v)


def _geometry(batch: ForwardBatch) -> tuple[np.ndarray | int, ...]:
    """The batch as attention_phase takes it."""
    return (
        batch.cu_rows.numpy(), batch.key_starts.numpy(), batch.key_lens.numpy(), batch.context_start,
        batch.context_lens.numpy(), batch.page_table.numpy(), batch.page_size,
        NO_FLAGS if batch.causal is None else batch.causal.numpy(),
        NO_MASK if batch.mask is None else batch.mask.numpy(),
    )  # fmt: skip
