"""Listening on a CPU: fused features, what is carried on, and the drafter's K/V entries in one call (Numba).

Legend: n committed rows, H hidden, Hk K/V heads, D head dim.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from wingbeat.kernels.cpu_forward import kv_row
from wingbeat.kernels.cpu_math import from_bf16, norm_row
from wingbeat.kernels.cpu_products import linear, product


@njit(nogil=True, cache=True)
def join_norms(token_ids, embedding, first_weight, hidden, second_weight, eps, out):
    """out [R, 2H] = [norm(embedding[token]); norm(hidden)], bf16 bits."""
    size = hidden.shape[1]
    row = np.empty(size, np.float32)
    for r in range(token_ids.shape[0]):
        token = embedding[token_ids[r]]
        for i in range(size):
            row[i] = from_bf16(token[i])
        norm_row(row, first_weight, eps, out[r, :size])
        for i in range(size):
            row[i] = from_bf16(hidden[r, i])
        norm_row(row, second_weight, eps, out[r, size:])


@njit(nogil=True, cache=True)
def _gather(aux, block_rows, x):
    for i in range(block_rows.shape[0]):
        x[i, : aux.shape[1]] = aux[block_rows[i]]


@njit(nogil=True, cache=True)
def _carry(fused, before, rows, lane_features, page_features, page_size):
    """before [n, H] gets the feature of the row before each row; then lanes and full pages keep their newest row's."""
    slots, positions, lanes, before_index = rows
    n = before_index.shape[0]
    for i in range(n):
        before[i] = fused[before_index[i]] if before_index[i] >= 0 else lane_features[lanes[i]]
    for i in range(n):
        if i + 1 == n or before_index[i + 1] < 0:
            lane_features[lanes[i]] = fused[i]
        if positions[i] % page_size == page_size - 1:
            page_features[slots[i] // page_size] = fused[i]


@njit(nogil=True, cache=True)
def _write_kv(y, rows, bias, k_norm, eps, cos, sin, k_out, v_out):
    num_kv_heads = k_out.shape[1]
    for r in range(rows[0].shape[0]):
        row, slot, position = y[r], rows[0][r], max(rows[1][r] - 1, 0)
        if bias.shape[0]:
            for i in range(bias.shape[0]):
                row[i] += bias[i]
        kv_row(row, 0, num_kv_heads, k_norm, eps, cos[position], sin[position], k_out[slot], v_out[slot])


@njit(nogil=True, cache=True)
def listen_rows(
    num_workers, phases, aux, block_rows, token_ids, rows, fuse, embedding, norms, kv, work, carried, page_size, pool
):
    """rows: slots, positions, lanes, before [n]. All features and K/V as bf16 bits."""
    n = block_rows.shape[0]
    fuse_x, fuse_y, fused, before, joined, kv_y = work
    _gather(aux, block_rows, fuse_x)
    linear(phases[0], num_workers, fuse, fuse_x, fuse_y, n, fused)
    _carry(fused, before, rows, carried[0], carried[1], page_size)
    embedding_norm, hidden_norm, eps = norms
    join_norms(token_ids, embedding, embedding_norm, before[:n], hidden_norm, eps, joined)
    weight, bias, k_norm, k_eps, cos, sin = kv
    product(phases[1], num_workers, weight, joined, kv_y, n)
    _write_kv(kv_y, rows, bias, k_norm, k_eps, cos, sin, pool[0], pool[1])
