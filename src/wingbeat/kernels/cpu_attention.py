"""Attention over pages and scratch, read in place (Numba).

A task is (sequence, some of its query rows, K/V head). It lists the addresses of the sequence's keys and values in
logical order, scores all of them for all its queries as a matrix product, and then, row by row, drops the keys the row
may not see and takes the exact softmax. Values are summed two keys at a time: the keys every row of the task sees for
all its queries together, the rest row by row. So a row's result depends on the keys it sees, in their order, and on
nothing else: not on where the context ends and the scratch begins, nor on the rows beside it.

Legend: R rows, Hq/Hk query and K/V heads, G = Hq/Hk, D head dim, Q queries of a task (its rows times G), M keys.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from wingbeat.kernels.cpu_claims import claim, finish, wait_all
from wingbeat.kernels.cpu_ir import pack_keys, value_tile
from wingbeat.kernels.cpu_math import exp, gemm, to_bf16

QUERIES_PER_TASK = 32
KEY_BLOCK = 16
TILE_BLOCKS = 6
"""Key blocks packed at a time: they stay in the first cache while every query passes by."""

_VALUES_1, _VALUES_2, _VALUES_3 = value_tile(1), value_tile(2), value_tile(3)
_VALUES_4, _VALUES_8 = value_tile(4), value_tile(8)


def rows_per_task(group: int) -> int:
    return max(1, QUERIES_PER_TASK // group)


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
def _list_context(keys, values, k_pages, v_pages, token_bytes, start, length, page_table, page_size):
    """Addresses of the committed entries start..length-1, page by page; returns how many."""
    count, position = 0, start
    while position < length:
        offset = position % page_size
        run = min(page_size - offset, length - position)
        first = (np.int64(page_table[position // page_size]) * page_size + offset) * token_bytes
        for i in range(run):
            keys[count + i], values[count + i] = k_pages + first + i * token_bytes, v_pages + first + i * token_bytes
        count, position = count + run, position + run
    return count


@njit(nogil=True, cache=True)
def _list_in_flight(keys, values, count, k_first, v_first, token_bytes, num_keys):
    """Appends the first num_keys in-flight entries and pads the last block of keys; returns how many in all."""
    for j in range(num_keys):
        keys[count + j], values[count + j] = k_first + j * token_bytes, v_first + j * token_bytes
    count += num_keys
    for i in range(count, count + KEY_BLOCK):
        keys[i] = keys[count - 1]
    return count


@njit(nogil=True, cache=True)
def _score(queries, num_queries, keys, count, packed, scores):
    """scores [Q, M] = queries [Q, D] . listed keys, a few packed blocks at a time."""
    head_dim = queries.shape[1]
    num_blocks = (count + KEY_BLOCK - 1) // KEY_BLOCK
    for first in range(0, num_blocks, TILE_BLOCKS):
        blocks = min(TILE_BLOCKS, num_blocks - first)
        for i in range(blocks):
            pack_keys(
                keys.ctypes.data + (first + i) * KEY_BLOCK * 8, packed.ctypes.data + i * head_dim * 32, head_dim // 32
            )
        gemm(
            packed.ctypes.data, 0, blocks, head_dim // 2, queries.ctypes.data, head_dim * 2,
            scores.ctypes.data + first * KEY_BLOCK * 4, scores.shape[1] * 4, num_queries,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _drop_unseen(scores, values, shared, seen, num_keys, tail):
    """Moves the scores of the seen in-flight keys together in scores [G, M], lists their values; returns the count."""
    count = shared
    for j in range(num_keys):
        if seen[j]:
            for g in range(scores.shape[0]):
                scores[g, count] = scores[g, shared + j]
            tail[count - shared] = values[shared + j]
            count += 1
    return count


@njit(nogil=True, cache=True)
def _add_values(values, num_pairs, weights, weights_step, acc, acc_step, num_queries, chunks):
    """acc [Q, D] += weights times the values at num_pairs pairs of listed addresses. All raw addresses."""
    if num_pairs == 0:
        return
    for c in range(chunks):
        q = 0
        while q < num_queries:
            left, w, a, offset = num_queries - q, weights + q * weights_step, acc + q * acc_step + c * 128, c * 64
            if left >= 8:
                _VALUES_8(values, offset, w, weights_step, a, acc_step, num_pairs)
                q += 8
            elif left >= 4:
                _VALUES_4(values, offset, w, weights_step, a, acc_step, num_pairs)
                q += 4
            elif left == 3:
                _VALUES_3(values, offset, w, weights_step, a, acc_step, num_pairs)
                q += 3
            elif left == 2:
                _VALUES_2(values, offset, w, weights_step, a, acc_step, num_pairs)
                q += 2
            else:
                _VALUES_1(values, offset, w, weights_step, a, acc_step, num_pairs)
                q += 1


@njit(nogil=True, cache=True)
def _tail_values(values, common, count, shared, causal, tail):
    """Addresses of a row's values from key `common` on, in pairs; `tail` holds a tree row's seen ones already."""
    if causal:
        for i in range(common, count):
            tail[i - common] = values[i]
    elif common < shared:  # an odd context leaves its last key to the rows
        for i in range(count - shared, 0, -1):
            tail[i] = tail[i - 1]
        tail[0] = values[common]
    tail[count - common] = tail[count - common - 1]


@njit(nogil=True, cache=True)
def _attend(
    q, out, first_row, num_rows, head, group, own, causal, mask, num_keys, shared, keys, values, tails, counts, queries,
    packed, scores, weights, acc, inverse,
):  # fmt: skip
    """Rows first_row.. of one K/V head; `own` is the first row's place among the in-flight keys."""
    head_dim, num_queries = q.shape[2], num_rows * group
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    for r in range(num_rows):
        for g in range(group):
            queries[r * group + g] = q[first_row + r, head * group + g]
    _score(queries, num_queries, keys, shared + num_keys, packed, scores)
    for r in range(num_rows):
        mine = scores[r * group : (r + 1) * group]
        counts[r] = shared + own + r + 1
        if not causal:
            counts[r] = _drop_unseen(mine, values, shared, mask[first_row + r], num_keys, tails[r])
        for g in range(group):
            inverse[r * group + g] = _softmax(mine[g], weights[r * group + g], counts[r], scale)
    common = (shared + own + 1 if causal else shared) // 2 * 2
    acc[:num_queries] = 0
    w_step, a_step, chunks = weights.shape[1] * 2, head_dim * 4, head_dim // 32
    _add_values(
        values.ctypes.data, common // 2, weights.ctypes.data, w_step, acc.ctypes.data, a_step, num_queries, chunks
    )
    for r in range(num_rows):
        if counts[r] > common:
            _tail_values(values, common, counts[r], shared, causal, tails[r])
            _add_values(
                tails[r].ctypes.data, (counts[r] - common + 1) // 2,
                weights.ctypes.data + r * group * w_step + common * 2, w_step,
                acc.ctypes.data + r * group * a_step, a_step, group, chunks,
            )  # fmt: skip
        for g in range(group):
            i, place = r * group + g, (head * group + g) * head_dim
            for d in range(head_dim):
                out[first_row + r, place + d] = to_bf16(acc[i, d] * inverse[i])


@njit(nogil=True, cache=True)
def _num_tasks(cu_rows, step, num_kv_heads):
    tasks = 0
    for b in range(cu_rows.shape[0] - 1):
        tasks += (np.int64(cu_rows[b + 1]) - np.int64(cu_rows[b]) + step - 1) // step
    return tasks * num_kv_heads


@njit(nogil=True, cache=True)
def attention_phase(phase, q, out, layer_kv, num_kv_heads, geometry, key_work):
    """One worker's tasks of q [R, Hq, D] bf16 bits -> out [R, Hq*D] bf16 bits; returns when all workers' are done."""
    cu_rows, key_starts, key_lens, context_start, context_lens, page_table, page_size, causal, mask = geometry
    keys, values, tails, counts, queries, packed, scores, weights, acc, inverse = key_work
    k_pages, v_pages = layer_kv[0].ctypes.data, layer_kv[1].ctypes.data
    k_scratch, v_scratch = layer_kv[2].ctypes.data, layer_kv[3].ctypes.data
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    token_bytes, step = num_kv_heads * head_dim * 2, max(1, QUERIES_PER_TASK // group)
    task, claimed = 0, claim(phase)
    for b in range(cu_rows.shape[0] - 1):
        first, last = np.int64(cu_rows[b]), np.int64(cu_rows[b + 1])
        is_causal = causal.shape[0] == 0 or causal[b]
        for row in range(first, last, step):
            for head in range(num_kv_heads):
                task += 1
                if task - 1 != claimed:
                    continue
                num_rows, own = min(step, last - row), key_lens[b] - (last - row)
                num_keys = own + num_rows if is_causal else np.int64(key_lens[b])
                offset = head * head_dim * 2
                shared = _list_context(
                    keys, values, k_pages + offset, v_pages + offset, token_bytes, context_start, context_lens[b],
                    page_table[b], page_size,
                )  # fmt: skip
                in_flight = key_starts[b] * token_bytes + offset
                _list_in_flight(
                    keys, values, shared, k_scratch + in_flight, v_scratch + in_flight, token_bytes, num_keys
                )
                _attend(
                    q, out, row, num_rows, head, group, own, is_causal, mask, num_keys, shared, keys, values, tails,
                    counts, queries, packed, scores, weights, acc, inverse,
                )  # fmt: skip
                finish(phase)
                claimed = claim(phase)
    wait_all(phase, _num_tasks(cu_rows, step, num_kv_heads))
