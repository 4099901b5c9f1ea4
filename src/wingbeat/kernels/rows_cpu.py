"""Bookkeeping of a step in single fused passes (Numba): pack candidates into rows; accept and advance.

The CUDA twins of these are what DESIGN section 3 calls selection and commit on the device.

Legend: B sequences, Bd decoding ones, C candidates per sequence (root is candidate 0), R rows, A deepest draft,
S lanes, n committed rows.
"""

# pyright: reportUnknownParameterType=false
from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from wingbeat.kernels import jit  # noqa: F401  where compiled code is cached is set before anything is compiled

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
Bools = NDArray[np.bool_]


@njit(cache=True, nogil=True)
def pack_rows(
    tokens: Ints, parents: Ints, depths: Ints, keep: Bools, max_depth: int
) -> tuple[Ints, Ints, Ints, Ints32, Bools, Ints32, bool]:
    """Kept candidates [Bd, C] as rows, sequence by sequence, parents first.

    `keep` is closed under ancestors and holds candidate 0. Returns token_ids [R], parent rows [R] (-1 for roots),
    depths [R], cu_rows [Bd+1], ancestor mask [R, W] (self included), path tokens [R, A] (-1 padded), all chains?
    """
    num_seqs, num_candidates = tokens.shape
    counts = np.zeros(num_seqs, np.int64)
    for b in range(num_seqs):
        for c in range(num_candidates):
            counts[b] += keep[b, c]
    num_rows, width = counts.sum(), counts.max() if num_seqs else 1
    out_tokens, out_parents = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    out_depths, cu_rows = np.empty(num_rows, np.int64), np.zeros(num_seqs + 1, np.int32)
    mask = np.zeros((num_rows, width), np.bool_)
    paths = np.full((num_rows, max_depth), -1, np.int32)
    local = np.empty(num_candidates, np.int64)
    chains, row = True, 0
    for b in range(num_seqs):
        base = row
        for c in range(num_candidates):
            if not keep[b, c]:
                continue
            local[c] = row - base
            parent = base + local[parents[b, c]] if c else -1
            out_tokens[row], out_depths[row], out_parents[row] = tokens[b, c], depths[b, c], parent
            if c:
                chains = chains and parent == row - 1
                mask[row] = mask[parent]
                paths[row] = paths[parent]
                paths[row, depths[b, c] - 1] = tokens[b, c]
            mask[row, row - base] = True
            row += 1
        cu_rows[b + 1] = row
    return out_tokens, out_parents, out_depths, cu_rows, mask, paths, chains


@njit(cache=True, nogil=True)
def _walk(row: int, end: int, parents: Ints, token_ids: Ints, sampled: Ints, path: Ints) -> int:
    """Follows the branch that matches what the target sampled; fills `path`, returns its length (root included)."""
    path[0] = row
    length, candidate = 1, row + 1
    while candidate < end:  # children stand behind their parent, so one sweep finds the whole path
        if parents[candidate] == path[length - 1] and token_ids[candidate] == sampled[path[length - 1]]:
            path[length] = candidate
            length += 1
        candidate += 1
    return length


@njit(cache=True, nogil=True)
def _num_kept(path: Ints, length: int, sampled: Ints, end_ids: Ints32, room: int) -> tuple[int, bool]:
    """How many of the path's sampled tokens stay: cut after the first ending token and at `room`. (count, ended)"""
    for i in range(min(length, room)):
        token = sampled[path[i]]
        for e in range(end_ids.shape[0]):
            if end_ids[e] < 0:
                break
            if end_ids[e] == token:
                return i + 1, True
    return min(length, room), length >= room


@njit(cache=True, nogil=True)
def accept_rows(
    lane_ids: Ints,
    cu_rows: Ints32,
    parents: Ints,
    token_ids: Ints,
    sampled: Ints,
    samples: Bools,
    num_decode: int,
    max_depth: int,
    history: Ints32,
    history_lens: Ints32,
    context_lens: Ints32,
    end_ids: Ints32,
    max_lens: Ints32,
    finished: Bools,
    page_table: Ints32,
    page_size: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Accepts, truncates at the first end, and advances the lanes in place.

    `sampled` [R] is the target's token at each row (only meaningful where sampled), `samples` [B] says which sequences
    sample in this step (all decoding ones, prefills whose chunk reaches the newest token).

    Returns tokens [B, A+1] (-1 padded), counts [B] of new tokens, matched [B] accepted drafts before truncation, and
    per committed row: block row [n], slot [n], position [n], sequence [n], index of the row before or -1 [n].
    """
    num_seqs, total = lane_ids.shape[0], token_ids.shape[0]
    tokens = np.full((num_seqs, max_depth + 1), -1, np.int64)
    counts, matched = np.zeros(num_seqs, np.int64), np.zeros(num_seqs, np.int64)
    rows, slots, positions = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    seqs, before = np.empty(total, np.int64), np.empty(total, np.int64)
    path = np.empty(total + 1, np.int64)
    n = 0
    for b in range(num_seqs):
        lane, first, end = lane_ids[b], cu_rows[b], cu_rows[b + 1]
        if finished[lane]:
            continue  # ended one step ago, unseen by the host: its surplus is dropped
        room = max_lens[lane] - history_lens[lane]
        if b < num_decode:
            length = _walk(first, end, parents, token_ids, sampled, path)
            matched[b] = length - 1
            count, ended = _num_kept(path, length, sampled, end_ids[lane], room)
            num_rows = count
        else:
            num_rows = end - first
            for i in range(num_rows):
                path[i] = first + i
            count, ended = 0, False
            if samples[b]:
                count, ended = _num_kept(path[num_rows - 1 : num_rows], 1, sampled, end_ids[lane], room)
        start = context_lens[lane]
        for i in range(num_rows):
            position = start + i
            rows[n], seqs[n], positions[n] = path[i], b, position
            slots[n] = np.int64(page_table[lane, position // page_size]) * page_size + position % page_size
            before[n] = n - 1 if i else -1
            n += 1
        for i in range(count):
            token = sampled[path[num_rows - count + i]]
            tokens[b, i] = token
            history[lane, history_lens[lane] + i] = token
        counts[b] = count
        history_lens[lane] += count
        context_lens[lane] += num_rows
        finished[lane] = ended
    return tokens, counts, matched, rows[:n], slots[:n], positions[:n], seqs[:n], before[:n]
