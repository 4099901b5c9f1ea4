"""The compiled part of a forward: all layers in one call, and the single products (Numba).

Five parallel regions per layer, workers splitting output blocks or claiming attention tasks:

    norm -> qkv | rope, K/V to scratch | attention -> o + residual | norm -> gate_up, silu*up | down + residual

Legend: R rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, L layers.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit, prange

from wingbeat.kernels.cpu_attention import attention_share
from wingbeat.kernels.cpu_math import (
    BLOCK,
    from_bf16,
    gemm,
    norm_head,
    norm_row,
    rotate_head,
    silu_mul_block,
    to_bf16,
)

SERIAL_ROWS = 4
"""Up to this many rows, row-wise work is done by one thread: a barrier costs more."""


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
        start = num_heads * head_dim
        _kv_row(row, start, num_kv_heads, k_norm, eps, cos[position], sin[position], k_out[slot], v_out[slot])


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
def run_layers(
    num_rows, num_workers, residual, normed, wide, q, mixed, act, counters, keys, values, tails, counts, queries,
    packed, scores, weights, acc, inverse, aux, capture, has_input,
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
            gemm(w.ctypes.data, first, last, w.shape[1], normed.ctypes.data, x_step, wide.ctypes.data, y_step, num_rows)
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
                counters[layer], q, mixed, pool_k[layer].ctypes.data, pool_v[layer].ctypes.data, k_new.ctypes.data,
                v_new.ctypes.data, num_kv_heads, cu_rows, key_starts, key_lens, context_start, context_lens,
                page_table, page_size, causal, mask, keys[t], values[t], tails[t], counts[t], queries[t], packed[t],
                scores[t], weights[t], acc[t], inverse[t],
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
def product(w, x, y, num_rows, num_workers):
    """y [R+tile, >= O] fp32 = x [R+tile, K] bf16 bits times packed w."""
    for t in prange(num_workers):
        first, last = _share(t, num_workers, w.shape[0])
        gemm(
            w.ctypes.data, first, last, w.shape[1], x.ctypes.data, x.shape[1] * 2, y.ctypes.data, y.shape[1] * 4,
            num_rows,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def norm_bits(x, weight, eps, out, num_rows):
    """Norm of bf16 rows into bf16 rows."""
    row = np.empty(x.shape[1], np.float32)
    for r in range(num_rows):
        for i in range(x.shape[1]):
            row[i] = from_bf16(x[r, i])
        norm_row(row, weight, eps, out[r])


@njit(nogil=True, cache=True)
def write_kv_rows(y, num_rows, bias, k_norm, eps, cos, sin, positions, slots, num_kv_heads, k_out, v_out):
    for r in range(num_rows):
        row, slot, position = y[r], slots[r], positions[r]
        if bias.shape[0]:
            for i in range(bias.shape[0]):
                row[i] += bias[i]
        _kv_row(row, 0, num_kv_heads, k_norm, eps, cos[position], sin[position], k_out[slot], v_out[slot])
