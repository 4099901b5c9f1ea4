"""Attention over pages and scratch, read in place (Numba).

A task is (sequence, K/V head, up to ROWS_PER_TASK query rows). It lists the addresses of the keys and values a row sees,
in logical order, then scores them 16 at a time, takes the exact softmax and sums the values two by two. A row's result
depends on its keys in that order alone - not on where the context ends and the scratch begins, nor on the rows beside it.

Legend: R rows, Hq/Hk query and K/V heads, G = Hq/Hk, D head dim, M visible keys (padded to 16).
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from wingbeat.kernels.cpu_ir import score_block, value_tile
from wingbeat.kernels.cpu_math import exp, to_bf16

ROWS_PER_TASK = 16
KEY_BLOCK = 16

_VALUES_1, _VALUES_3, _VALUES_4 = value_tile(1), value_tile(3), value_tile(4)


@njit(fastmath=True, nogil=True, cache=True)
def _softmax(scores, weights, count, scale):
    """weights[:count] = exp(scale * (score - max)) as bf16, zero up to an even count; returns 1 / sum."""
    largest = scores[0]
    for i in range(count):
        largest = max(largest, scores[i])
    total = np.float32(0.0)
    for i in range(count):
        weight = exp((scores[i] - largest) * scale)
        total += weight
        weights[i] = to_bf16(weight)
    if count % 2:
        weights[count] = 0
    return np.float32(1.0) / total


@njit(nogil=True, cache=True)
def _list_context(keys, values, k_pages, v_pages, head_offset, token_bytes, start, length, page_table, page_size):
    """Addresses of the committed entries start..length-1; returns how many."""
    count = 0
    for position in range(start, length):
        slot = np.int64(page_table[position // page_size]) * page_size + position % page_size
        keys[count] = k_pages + slot * token_bytes + head_offset
        values[count] = v_pages + slot * token_bytes + head_offset
        count += 1
    return count


@njit(nogil=True, cache=True)
def _list_in_flight(keys, values, count, k_first, v_first, token_bytes, key_len, own, causal, seen):
    """Appends the in-flight keys a row sees (up to `own` when causal, else where `seen`), pads; returns how many."""
    for j in range(own + 1 if causal else key_len):
        if causal or seen[j]:
            keys[count], values[count] = k_first + j * token_bytes, v_first + j * token_bytes
            count += 1
    for i in range(count, count + KEY_BLOCK):  # a block may read past the end: any valid address will do
        keys[i], values[i] = keys[count - 1], values[count - 1]
    return count


@njit(nogil=True, cache=True)
def _attend_row(query, q_step, group, keys, values, count, scores, weights, acc, scale, out):
    """One row's G query heads (bf16, q_step bytes apart) over `count` listed keys -> out [G*D] bf16 bits."""
    head_dim = out.shape[0] // group
    chunks = head_dim // 32
    for g in range(group):
        for block in range(0, count, KEY_BLOCK):
            score_block(
                query + g * q_step, keys.ctypes.data + block * 8, scores.ctypes.data + block * 4, chunks
            )
        acc[g, head_dim] = _softmax(scores, weights[g], count, scale)
    w, w_step, a, a_step = weights.ctypes.data, weights.shape[1] * 2, acc.ctypes.data, acc.shape[1] * 4
    for c in range(chunks):
        g = 0
        while g < group:
            place, row, where = a + g * a_step + c * 128, w + g * w_step, values.ctypes.data
            if g + 4 <= group:
                _VALUES_4(where, c * 64, row, w_step, place, a_step, (count + 1) // 2)
                g += 4
            elif g + 3 <= group:
                _VALUES_3(where, c * 64, row, w_step, place, a_step, (count + 1) // 2)
                g += 3
            else:
                _VALUES_1(where, c * 64, row, w_step, place, a_step, (count + 1) // 2)
                g += 1
    for g in range(group):
        for d in range(head_dim):
            out[g * head_dim + d] = to_bf16(acc[g, d] * acc[g, head_dim])


@njit(nogil=True, cache=True)
def attention_share(
    worker, num_workers, q, out, k_pages, v_pages, k_scratch, v_scratch, num_kv_heads, cu_rows, key_starts, key_lens,
    context_start, context_lens, page_table, page_size, causal, mask, scores, weights, keys, values, acc,
):  # fmt: skip
    """This worker's tasks: q [R, Hq, D] bf16 bits -> out [R, Hq*D] bf16 bits. K/V as addresses of one layer."""
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    token_bytes, q_step = num_kv_heads * head_dim * 2, head_dim * 2
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    no_mask = np.zeros(0, np.bool_)
    task = 0
    for b in range(cu_rows.shape[0] - 1):
        first, last = cu_rows[b], cu_rows[b + 1]
        is_causal = causal.shape[0] == 0 or causal[b]
        for row0 in range(first, last, ROWS_PER_TASK):
            for h in range(num_kv_heads):
                task += 1
                if task % num_workers != worker:
                    continue
                offset = h * head_dim * 2
                shared = _list_context(
                    keys, values, k_pages, v_pages, offset, token_bytes, context_start, context_lens[b],
                    page_table[b], page_size,
                )  # fmt: skip
                in_flight = key_starts[b] * token_bytes + offset
                for row in range(row0, min(row0 + ROWS_PER_TASK, last)):
                    own = key_lens[b] - (last - row)
                    count = _list_in_flight(
                        keys, values, shared, k_scratch + in_flight, v_scratch + in_flight, token_bytes, key_lens[b],
                        own, is_causal, no_mask if is_causal else mask[row],
                    )  # fmt: skip
                    _attend_row(
                        q.ctypes.data + (row * q.shape[1] + h * group) * q_step, q_step, group, keys, values, count,
                        scores, weights, acc, scale, out[row, h * group * head_dim : (h + 1) * group * head_dim],
                    )  # fmt: skip
