"""Attention over pages and scratch, read in place (Numba).

A task is (sequence, K/V head, up to ROWS_PER_TASK query rows): rows and the query heads of the group share each K/V load.
Scores of all visible keys are kept, so softmax is exact and a row's result depends on its keys in logical order alone -
not on where the context ends and the scratch begins, nor on the rows beside it.

Legend: R rows, Hq/Hk query and K/V heads, G = Hq/Hk, D head dim, M visible keys.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from wingbeat.kernels.cpu_ir import axpy_bf16, dot_bf16
from wingbeat.kernels.cpu_math import exp, to_bf16

ROWS_PER_TASK = 16


@njit(nogil=True, cache=True)
def count_tasks(cu_rows, num_kv_heads):
    total = 0
    for b in range(cu_rows.shape[0] - 1):
        total += -(-(cu_rows[b + 1] - cu_rows[b]) // ROWS_PER_TASK) * num_kv_heads
    return total


@njit(fastmath=True, nogil=True, cache=True)
def _softmax(scores, count):
    """scores[:count] -> exp(score - max); returns 1 / sum."""
    largest = scores[0]
    for i in range(count):
        largest = max(largest, scores[i])
    total = np.float32(0.0)
    for i in range(count):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    return np.float32(1.0) / total


@njit(nogil=True, cache=True)
def _slot_offset(page_table, position, page_size, token_bytes):
    return (np.int64(page_table[position // page_size]) * page_size + position % page_size) * token_bytes


@njit(nogil=True, cache=True)
def _task(
    q, out, first, last, row0, h, group, k_pages, v_pages, k_scratch, v_scratch, token_bytes,
    key_start, key_len, context_start, context_len, page_table, page_size, causal, mask, scores, counts, acc,
):  # fmt: skip
    """Rows row0.. of one sequence (its rows are first..last-1 of the batch), K/V head h; addresses of one layer."""
    head_dim = q.shape[2]
    vectors, head_bytes = head_dim // 16, head_dim * 2
    num_rows = min(last - row0, ROWS_PER_TASK)
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    q_base, q_row, q_head = q.ctypes.data, q.shape[1] * head_dim * 4, head_dim * 4
    shared = context_len - context_start
    for j in range(shared):
        key = k_pages + _slot_offset(page_table, context_start + j, page_size, token_bytes) + h * head_bytes
        for i in range(num_rows):
            for g in range(group):
                query = q_base + (row0 + i) * q_row + (h * group + g) * q_head
                scores[i * group + g, j] = dot_bf16(query, key, vectors) * scale
    for i in range(num_rows):
        counts[i] = shared
        own = key_len - (last - first) + (row0 + i - first)
        for j in range(key_len):
            if (j <= own) if causal else mask[row0 + i, j]:
                key = k_scratch + (key_start + j) * token_bytes + h * head_bytes
                for g in range(group):
                    query = q_base + (row0 + i) * q_row + (h * group + g) * q_head
                    scores[i * group + g, counts[i]] = dot_bf16(query, key, vectors) * scale
                counts[i] += 1
            elif causal:
                break
    acc[: num_rows * group] = np.float32(0.0)
    acc_base, acc_row = acc.ctypes.data, acc.shape[1] * 4
    for i in range(num_rows):
        for g in range(group):
            row = i * group + g
            acc[row, head_dim] = _softmax(scores[row], counts[i])
    for j in range(shared):
        value = v_pages + _slot_offset(page_table, context_start + j, page_size, token_bytes) + h * head_bytes
        for row in range(num_rows * group):
            axpy_bf16(acc_base + row * acc_row, scores[row, j], value, vectors)
    for i in range(num_rows):
        own = key_len - (last - first) + (row0 + i - first)
        seen = shared
        for j in range(key_len):
            if (j <= own) if causal else mask[row0 + i, j]:
                value = v_scratch + (key_start + j) * token_bytes + h * head_bytes
                for g in range(group):
                    axpy_bf16(acc_base + (i * group + g) * acc_row, scores[i * group + g, seen], value, vectors)
                seen += 1
            elif causal:
                break
        for g in range(group):
            row, column = i * group + g, (h * group + g) * head_dim
            for d in range(head_dim):
                out[row0 + i, column + d] = to_bf16(acc[row, d] * acc[row, head_dim])


@njit(nogil=True, cache=True)
def attention_share(
    worker, num_workers, q, out, k_pages, v_pages, k_scratch, v_scratch, num_kv_heads, cu_rows, key_starts, key_lens,
    context_start, context_lens, page_table, page_size, causal, mask, scores, counts, acc,
):  # fmt: skip
    """This worker's tasks: q [R, Hq, D] fp32 -> out [R, Hq*D] bf16 bits."""
    group, token_bytes = q.shape[1] // num_kv_heads, num_kv_heads * q.shape[2] * 2
    task = 0
    for b in range(cu_rows.shape[0] - 1):
        first, last = cu_rows[b], cu_rows[b + 1]
        is_causal = causal.shape[0] == 0 or causal[b]
        for row0 in range(first, last, ROWS_PER_TASK):
            for h in range(num_kv_heads):
                if task % num_workers == worker:
                    _task(
                        q, out, first, last, row0, h, group, k_pages, v_pages, k_scratch, v_scratch, token_bytes,
                        key_starts[b], key_lens[b], context_start, context_lens[b], page_table[b], page_size,
                        is_causal, mask, scores, counts, acc,
                    )  # fmt: skip
                task += 1
