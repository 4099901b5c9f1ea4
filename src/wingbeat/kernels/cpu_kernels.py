"""The cpu backend: bf16 weights packed once, one compiled call per forward, K/V read in place (Numba).

Five parallel regions per layer, workers splitting output blocks or attention tasks:

    norm -> qkv | rope, K/V to scratch | attention -> o + residual | norm -> gate_up, silu*up | down + residual

The residual stream is fp32 inside a forward. Rows are independent of one another bit for bit, so the tokens of greedy
speculation are exactly those of plain decoding here, in bf16 too.

Legend: R rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, L layers, V vocab.
"""

# mypy: ignore-errors
from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.cpu_attention import KEY_BLOCK, attention_share
from wingbeat.kernels.cpu_math import (
    BLOCK,
    ROW_TILE,
    aligned,
    from_bf16,
    gemm,
    norm_head,
    norm_row,
    pack,
    rotate_head,
    silu_mul_block,
    to_bf16,
)
from wingbeat.kernels.interface import DecoderStack, Head, LayerWeights, Linear, StackShape
from wingbeat.kernels.torch_kernels import TorchStack, rms_norm

SERIAL_ROWS = 4
"""Up to this many rows, row-wise work is done by one thread: a barrier costs more."""
NO_MASK = np.zeros((0, 0), np.bool_)
NO_FLAGS = np.zeros(0, np.bool_)


def bits(tensor: Tensor) -> np.ndarray:
    """A bf16 tensor's memory as uint16."""
    return tensor.view(torch.uint16).numpy()


def floats(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy())


@njit(nogil=True, cache=True)
def _share(worker, num_workers, count):
    return worker * count // num_workers, (worker + 1) * count // num_workers


@njit(nogil=True, cache=True)
def _norm_rows(x, weight, eps, out, first, last):
    for r in range(first, last):
        norm_row(x[r], weight, eps, out[r])


@njit(nogil=True, cache=True)
def _rope_rows(
    qkv, first, last, bias, q_norm, k_norm, eps, cos, sin, positions, slots, q, k_out, v_out, num_heads, num_kv_heads
):
    """Bias, head norms and rotation of rows first..last-1; all rounded to bf16, k and v at their slots."""
    head_dim = k_out.shape[2]
    for r in range(first, last):
        row, slot, position = qkv[r], slots[r], positions[r]
        if bias.shape[0]:
            for i in range(bias.shape[0]):
                row[i] += bias[i]
        for h in range(num_heads):
            head = row[h * head_dim : (h + 1) * head_dim]
            if q_norm.shape[0]:
                norm_head(head, q_norm, eps)
            rotate_head(head, cos[position], sin[position])
            for d in range(head_dim):
                q[r, h, d] = to_bf16(head[d])
        _kv_row(row, num_heads * head_dim, num_kv_heads, k_norm, eps, cos[position], sin[position], k_out[slot], v_out[slot])


@njit(nogil=True, cache=True)
def _kv_row(row, start, num_kv_heads, k_norm, eps, cos, sin, k_out, v_out):
    """One row's k (normed, rotated) and v, found at `start` of `row`, as bf16."""
    head_dim = k_out.shape[1]
    for h in range(num_kv_heads):
        head = row[start + h * head_dim : start + (h + 1) * head_dim]
        if k_norm.shape[0]:
            norm_head(head, k_norm, eps)
        rotate_head(head, cos, sin)
        values = row[start + (num_kv_heads + h) * head_dim : start + (num_kv_heads + h + 1) * head_dim]
        for d in range(head_dim):
            k_out[h, d] = to_bf16(head[d])
            v_out[h, d] = to_bf16(values[d])


@njit(nogil=True, cache=True)
def _add_columns(residual, y, num_rows, first_block, last_block):
    last = min(last_block * BLOCK, residual.shape[1])
    for r in range(num_rows):
        for i in range(first_block * BLOCK, last):
            residual[r, i] += y[r, i]


@njit(nogil=True, cache=True)
def _silu_columns(y, act, num_rows, first_pair, last_pair):
    """Blocks 2i and 2i+1 of y are gate and up of block i."""
    for r in range(num_rows):
        for i in range(first_pair, last_pair):
            gate, up = 2 * i * BLOCK, (2 * i + 1) * BLOCK
            silu_mul_block(y[r, gate : gate + BLOCK], y[r, up : up + BLOCK], act[r, i * BLOCK : (i + 1) * BLOCK])


@njit(nogil=True, cache=True)
def _capture(residual, aux, num_rows, column):
    for r in range(num_rows):
        for i in range(residual.shape[1]):
            aux[r, column + i] = to_bf16(residual[r, i])


@njit(nogil=True, cache=True, parallel=True)
def _forward(
    num_rows, num_workers, residual, normed, wide, q, mixed, act, scores, weights, keys, values, acc, aux, capture,
    has_input,
    w_qkv, w_o, w_gate_up, w_down, norms_in, norms_post, biases, q_norms, k_norms, eps, cos, sin, num_kv_heads,
    pool_k, pool_v, scratch_k, scratch_v, positions, slots, cu_rows, key_starts, key_lens, context_start, context_lens,
    page_table, page_size, causal, mask,
):  # fmt: skip
    """residual [R, H] fp32 in and out; weights [L, blocks, pairs, 32]; pools [L, S, Hk, D] bf16 bits."""
    num_layers, hidden, num_heads = w_qkv.shape[0], residual.shape[1], q.shape[1]
    y_step, x_step = wide.shape[1] * 4, normed.shape[1] * 2
    mixed_step, act_step = mixed.shape[1] * 2, act.shape[1] * 2
    serial = num_rows <= SERIAL_ROWS
    for layer in range(num_layers):
        for c in range(capture.shape[0]):
            if capture[c] == layer:
                _capture(residual, aux, num_rows, c * hidden)
        if not (layer == 0 and has_input):
            if serial:
                _norm_rows(residual, norms_in[layer], eps, normed, 0, num_rows)
            else:
                for t in prange(num_workers):
                    first, last = _share(t, num_workers, num_rows)
                    _norm_rows(residual, norms_in[layer], eps, normed, first, last)
        w = w_qkv[layer]
        for t in prange(num_workers):
            first, last = _share(t, num_workers, w.shape[0])
            gemm(
                w.ctypes.data, first, last, w.shape[1], normed.ctypes.data, x_step, wide.ctypes.data, y_step, num_rows
            )
        k_new, v_new = scratch_k[layer], scratch_v[layer]
        if serial:
            _rope_rows(
                wide, 0, num_rows, biases[layer], q_norms[layer], k_norms[layer], eps, cos, sin, positions, slots, q,
                k_new, v_new, num_heads, num_kv_heads,
            )  # fmt: skip
        else:
            for t in prange(num_workers):
                first, last = _share(t, num_workers, num_rows)
                _rope_rows(
                    wide, first, last, biases[layer], q_norms[layer], k_norms[layer], eps, cos, sin, positions, slots,
                    q, k_new, v_new, num_heads, num_kv_heads,
                )  # fmt: skip
        for t in prange(num_workers):
            attention_share(
                t, num_workers, q, mixed, pool_k[layer].ctypes.data, pool_v[layer].ctypes.data, k_new.ctypes.data,
                v_new.ctypes.data, num_kv_heads, cu_rows, key_starts, key_lens, context_start, context_lens,
                page_table, page_size, causal, mask, scores[t], weights[t], keys[t], values[t], acc[t],
            )  # fmt: skip
        w = w_o[layer]
        for t in prange(num_workers):
            first, last = _share(t, num_workers, w.shape[0])
            gemm(
                w.ctypes.data, first, last, w.shape[1], mixed.ctypes.data, mixed_step, wide.ctypes.data, y_step,
                num_rows,
            )  # fmt: skip
            _add_columns(residual, wide, num_rows, first, last)
        if serial:
            _norm_rows(residual, norms_post[layer], eps, normed, 0, num_rows)
        else:
            for t in prange(num_workers):
                first, last = _share(t, num_workers, num_rows)
                _norm_rows(residual, norms_post[layer], eps, normed, first, last)
        w = w_gate_up[layer]
        for t in prange(num_workers):
            first, last = _share(t, num_workers, w.shape[0] // 2)
            gemm(
                w.ctypes.data, 2 * first, 2 * last, w.shape[1], normed.ctypes.data, x_step, wide.ctypes.data, y_step,
                num_rows,
            )  # fmt: skip
            _silu_columns(wide, act, num_rows, first, last)
        w = w_down[layer]
        for t in prange(num_workers):
            first, last = _share(t, num_workers, w.shape[0])
            gemm(w.ctypes.data, first, last, w.shape[1], act.ctypes.data, act_step, wide.ctypes.data, y_step, num_rows)
            _add_columns(residual, wide, num_rows, first, last)
    for c in range(capture.shape[0]):
        if capture[c] == num_layers:
            _capture(residual, aux, num_rows, c * hidden)


@njit(nogil=True, cache=True, parallel=True)
def _product(w, x, y, num_rows, num_workers):
    """y [R+tile, >= O] fp32 = x [R+tile, K] bf16 bits times packed w."""
    for t in prange(num_workers):
        first, last = _share(t, num_workers, w.shape[0])
        gemm(
            w.ctypes.data, first, last, w.shape[1], x.ctypes.data, x.shape[1] * 2, y.ctypes.data, y.shape[1] * 4,
            num_rows,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _norm_bits(x, weight, eps, out, num_rows):
    """Norm of bf16 rows into bf16 rows."""
    row = np.empty(x.shape[1], np.float32)
    for r in range(num_rows):
        for i in range(x.shape[1]):
            row[i] = from_bf16(x[r, i])
        norm_row(row, weight, eps, out[r])


@njit(nogil=True, cache=True)
def _write_kv(y, num_rows, bias, k_norm, eps, cos, sin, positions, slots, num_kv_heads, k_out, v_out):
    for r in range(num_rows):
        row = y[r]
        if bias.shape[0]:
            for i in range(bias.shape[0]):
                row[i] += bias[i]
        _kv_row(row, 0, num_kv_heads, k_norm, eps, cos[positions[r]], sin[positions[r]], k_out[slots[r]], v_out[slots[r]])


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
        self.num_keys = num_keys
        self.scores = np.zeros((num_workers, width), np.float32)
        self.weights = np.zeros((num_workers, group, width), np.uint16)
        self.keys = np.zeros((num_workers, width), np.int64)
        self.values = np.zeros((num_workers, width), np.int64)
        self.acc = np.zeros((num_workers, group, shape.head_dim + 1), np.float32)


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
        _forward(
            num_rows, self._workers, stream, work.normed, work.wide, work.q, work.mixed, work.act, near.scores,
            near.weights, near.keys, near.values, near.acc, bits(aux), np.array(capture, np.int64), first_input is not None, self._qkv, self._o,
            self._gate_up, self._down, self._norms_in, self._norms_post, self._biases, self._q_norms, self._k_norms,
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
        _product(self._kv, work.normed, work.wide, num_rows, self._workers)
        start = s.num_heads * s.head_dim
        _write_kv(
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
        _product(self._packed, padded, y.numpy(), num_rows, self._workers)
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
        _norm_bits(bits(hidden.contiguous()), self._norm, self._eps, normed, num_rows)
        logits = torch.empty(_padded(num_rows), self._packed.shape[0] * BLOCK)
        _product(self._packed, normed, logits.numpy(), num_rows, self._workers)
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
