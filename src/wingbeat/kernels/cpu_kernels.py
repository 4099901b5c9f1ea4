"""The cpu backend: bf16 weights packed once, one compiled call per forward, K/V read in place (Numba).

The residual stream is fp32 inside a forward. Rows are independent of one another bit for bit, so the tokens of greedy
speculation are exactly those of plain decoding here, in bf16 too.

Legend: R rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, L layers, V vocab.
"""

# mypy: ignore-errors
from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.cpu_attention import KEY_BLOCK, TILE_BLOCKS, rows_per_task
from wingbeat.kernels.cpu_forward import norm_bits, product, run_layers, write_kv_rows
from wingbeat.kernels.cpu_math import BLOCK, ROW_TILE, aligned, pack
from wingbeat.kernels.interface import DecoderStack, Head, LayerWeights, Linear, StackShape
from wingbeat.kernels.torch_kernels import TorchStack, rms_norm

NO_MASK = np.zeros((0, 0), np.bool_)
NO_FLAGS = np.zeros(0, np.bool_)


def bits(tensor: Tensor) -> np.ndarray:
    """A bf16 tensor's memory as uint16."""
    return tensor.view(torch.uint16).numpy()


def floats(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy())


def _even(size: int) -> int:
    return size + size % 2


def _padded(num_rows: int) -> int:
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
        s, rows = shape, _padded(num_rows)
        heads = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        self.num_rows = num_rows
        self.normed = np.zeros((rows, _even(max(s.hidden_size, s.input_size))), np.uint16)
        self.wide = np.zeros((rows, max(heads, 2 * s.intermediate_size, s.hidden_size)), np.float32)
        self.q = np.zeros((rows, s.num_heads, s.head_dim), np.uint16)
        self.mixed = np.zeros((rows, s.num_heads * s.head_dim), np.uint16)
        self.act = np.zeros((rows, s.intermediate_size), np.uint16)


class _KeyWork:
    """Per-worker buffers of attention for up to `num_keys` visible keys."""

    def __init__(self, num_keys: int, shape: StackShape, num_workers: int) -> None:
        group, width = shape.num_heads // shape.num_kv_heads, num_keys + 2 * KEY_BLOCK
        rows, dim = rows_per_task(group), shape.head_dim
        num_queries = rows * group + ROW_TILE
        self.num_keys = num_keys
        self.keys = np.zeros((num_workers, width), np.int64)
        self.values = np.zeros((num_workers, width), np.int64)
        self.tails = np.zeros((num_workers, rows, width), np.int64)
        self.counts = np.zeros((num_workers, rows), np.int64)
        self.queries = np.zeros((num_workers, num_queries, dim), np.uint16)
        self.packed = aligned(np.zeros((num_workers, TILE_BLOCKS * KEY_BLOCK * dim), np.uint16))
        self.scores = np.zeros((num_workers, num_queries, width), np.float32)
        self.weights = np.zeros((num_workers, num_queries, width), np.uint16)
        self.acc = np.zeros((num_workers, num_queries, dim), np.float32)
        self.inverse = np.zeros((num_workers, num_queries), np.float32)


class CpuStack:
    """Implements interface.DecoderStack for bf16 on a CPU; hidden and intermediate in multiples of 16, heads of 32."""

    def __init__(
        self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor], num_workers: int
    ) -> None:
        self._shape, self._workers = shape, num_workers
        q_rows = shape.num_heads * shape.head_dim
        none = np.zeros(0, np.float32)

        def rows(tensors: list[Tensor | None]) -> np.ndarray:
            return np.stack([none if t is None else floats(t) for t in tensors])

        self._qkv = _stack_arrays([pack(layer.qkv) for layer in layers])
        self._o = _stack_arrays([pack(layer.o) for layer in layers])
        self._gate_up = _stack_arrays([pack(_interleave(layer.gate_up)) for layer in layers])
        self._down = _stack_arrays([pack(layer.down) for layer in layers])
        self._kv = self._qkv[0, q_rows // BLOCK :]
        self._norms_in = rows([layer.input_norm for layer in layers])
        self._norms_post = rows([layer.post_norm for layer in layers])
        self._biases = rows([layer.qkv_bias for layer in layers])
        self._q_norms, self._k_norms = rows([la.q_norm for la in layers]), rows([la.k_norm for la in layers])
        self._cos, self._sin = floats(rope[0]), floats(rope[1])
        self._work = _Work(16, shape, num_workers)
        self._key_work = _KeyWork(256, shape, num_workers)
        self._eps = np.float32(shape.rms_norm_eps)

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
            num_rows, self._workers, stream, work.normed, work.wide, work.q, work.mixed, work.act,
            np.zeros((s.num_layers, 8), np.int64), near.keys, near.values, near.tails, near.counts, near.queries,
            near.packed, near.scores, near.weights, near.acc, near.inverse, bits(aux), np.array(capture, np.int64),
            first_input is not None, self._qkv, self._o, self._gate_up, self._down, self._norms_in, self._norms_post,
            self._biases, self._q_norms, self._k_norms,
            self._eps, self._cos, self._sin, s.num_kv_heads, bits(pool.k), bits(pool.v), bits(pool.scratch_k),
            bits(pool.scratch_v), batch.positions.numpy(), batch.scratch_slots.numpy(), batch.cu_rows.numpy(),
            batch.key_starts.numpy(), batch.key_lens.numpy(), batch.context_start, batch.context_lens.numpy(),
            batch.page_table.numpy(), batch.page_size,
            NO_FLAGS if batch.causal is None else batch.causal.numpy(),
            NO_MASK if batch.mask is None else batch.mask.numpy(),
        )  # fmt: skip
        return torch.from_numpy(stream).to(torch.bfloat16), aux if capture else None

    def write_kv(self, first_input: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        num_rows, s = first_input.shape[0], self._shape
        work = self._rows(num_rows)
        work.normed[:num_rows, : s.input_size] = bits(first_input)
        product(self._kv, work.normed, work.wide, num_rows, self._workers)
        start = s.num_heads * s.head_dim
        write_kv_rows(
            work.wide, num_rows, self._biases[0][start:], self._k_norms[0], self._eps, self._cos, self._sin,
            positions.numpy(), slots.numpy(), s.num_kv_heads, bits(pool.k)[0], bits(pool.v)[0],
        )  # fmt: skip

    def _rows(self, num_rows: int) -> _Work:
        if num_rows > self._work.num_rows:
            self._work = _Work(2 * num_rows, self._shape, self._workers)
        return self._work

    def _keys(self, num_keys: int) -> _KeyWork:
        if num_keys > self._key_work.num_keys:
            self._key_work = _KeyWork(2 * num_keys, self._shape, self._workers)
        return self._key_work


class CpuLinear:
    """Implements interface.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_workers: int) -> None:
        self._packed, self._workers = pack(weight), num_workers
        self._outputs = weight.shape[0]
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = np.zeros((_padded(num_rows), 2 * self._packed.shape[1]), np.uint16)
        padded[:num_rows, : x.shape[1]] = bits(x.contiguous())
        y = torch.empty(_padded(num_rows), self._packed.shape[0] * BLOCK)
        product(self._packed, padded, y.numpy(), num_rows, self._workers)
        out = y[:num_rows, : self._outputs]
        return (out if self._bias is None else out + self._bias).to(torch.bfloat16)


class CpuHead:
    """Implements interface.Head."""

    def __init__(self, norm: Tensor, eps: float, weight: Tensor, num_workers: int) -> None:
        self._packed, self._norm, self._eps = pack(weight), floats(norm), np.float32(eps)
        self._vocab, self._workers = weight.shape[0], num_workers

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = hidden.shape[0]
        normed = np.zeros((_padded(num_rows), 2 * self._packed.shape[1]), np.uint16)
        norm_bits(bits(hidden.contiguous()), self._norm, self._eps, normed, num_rows)
        logits = torch.empty(_padded(num_rows), self._packed.shape[0] * BLOCK)
        product(self._packed, normed, logits.numpy(), num_rows, self._workers)
        logits = logits[:num_rows, : self._vocab]
        return logits if logits.is_contiguous() else logits.contiguous()


class CpuKernels:
    """Implements interface.KernelFactory; shapes it cannot pack go to the torch backend."""

    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        self._workers = min(num_threads, numba.config.NUMBA_NUM_THREADS)

    def stack(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> DecoderStack:
        if shape.hidden_size % BLOCK or shape.intermediate_size % BLOCK or shape.head_dim % 32:
            return TorchStack(shape, layers, rope)
        return CpuStack(shape, layers, rope, self._workers)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CpuLinear(weight, bias, self._workers)

    def head(self, norm: Tensor, eps: float, weight: Tensor) -> Head:
        return CpuHead(norm, eps, weight, self._workers)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)
