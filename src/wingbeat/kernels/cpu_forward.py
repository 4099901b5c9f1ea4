"""The compiled part of a forward: all layers in one call, and the single products (Numba).

Nine phases per layer, each claimed in units of rows, output blocks or attention tasks:

    capture where asked for, norm, qkv, rope and K/V to scratch, attention, o + residual, norm, gate_up with silu*up,
    down + residual

Legend: R rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, L layers.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import njit, prange

from wingbeat.kernels.cpu_attention import attention_phase
from wingbeat.kernels.cpu_claims import claim, finish, wait_all
from wingbeat.kernels.cpu_ir import silu_mul
from wingbeat.kernels.cpu_math import (
    BLOCK,
    granule,
    norm_head,
    norm_row,
    rest,
    rotate_head,
    to_bf16,
)
from wingbeat.kernels.cpu_products import UNITS_PER_WORKER, blocks, gemm_blocks, product_phase, shares

SERIAL_ROWS = 4
"""Up to this many rows, row-wise work is one unit: sharing it costs more."""
PHASES = 9


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
        kv_row(row, start, num_kv_heads, k_norm, eps, cos[position], sin[position], k_out[slot], v_out[slot])


@njit(nogil=True, cache=True)
def kv_row(row, start, num_kv_heads, k_norm, eps, cos, sin, k_out, v_out):
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
    y_step, act_step = y.shape[1] * 4, act.shape[1] * 2
    for r in range(num_rows):
        for i in range(first_pair, last_pair):
            gate = y.ctypes.data + r * y_step + i * 2 * BLOCK * 4
            silu_mul(gate, gate + BLOCK * 4, act.ctypes.data + r * act_step + i * BLOCK * 2)


@njit(nogil=True, cache=True)
def _capture_rows(residual, aux, capture, layer, first, last):
    """Copies rows of the stream where `layer` is asked for, as bf16, into its columns of aux."""
    hidden = residual.shape[1]
    for c in range(capture.shape[0]):
        if capture[c] == layer:
            for r in range(first, last):
                for i in range(hidden):
                    aux[r, c * hidden + i] = to_bf16(residual[r, i])


@njit(nogil=True, cache=True)
def _norm_phase(phase, units, x, weight, eps, out, num_rows):
    unit = claim(phase)
    while unit < units:
        first, last = _share(unit, units, num_rows)
        _norm_rows(x, weight, eps, out, first, last)
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _capture_phase(phase, units, residual, aux, capture, layer, num_rows):
    """Nothing writes the stream before every worker has seen this phase end."""
    unit = claim(phase)
    while unit < units:
        first, last = _share(unit, units, num_rows)
        _capture_rows(residual, aux, capture, layer, first, last)
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _residual_phase(phase, num_workers, w, x, y, num_rows, residual):
    """residual += x . w"""
    tile = granule(num_rows)
    units = shares(w.shape[0], tile, num_workers)
    unit = claim(phase)
    while unit < units:
        first, last = blocks(unit, units, w.shape[0], tile)
        gemm_blocks(w, first, last, x, y, num_rows)
        _add_columns(residual, y, num_rows, first, last)
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _gate_up_phase(phase, num_workers, w, x, y, num_rows, act):
    """act = silu(gate) * up"""
    tile, pairs = granule(num_rows), w.shape[0] // 2
    units = shares(pairs, tile, num_workers)
    unit = claim(phase)
    while unit < units:
        first, last = blocks(unit, units, pairs, tile)
        gemm_blocks(w, 2 * first, 2 * last, x, y, num_rows)
        _silu_columns(y, act, num_rows, first, last)
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _rope_phase(phase, units, num_rows, wide, bias, norms, eps, rope, positions, slots, q, k_new, v_new, num_kv_heads):
    unit = claim(phase)
    while unit < units:
        first, last = _share(unit, units, num_rows)
        _rope_rows(
            wide, first, last, bias, norms[0], norms[1], eps, rope[0], rope[1], positions, slots, q, k_new, v_new,
            q.shape[1], num_kv_heads,
        )  # fmt: skip
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _layers_share(
    worker, num_workers, phases, num_rows, residual, work, key_work, aux, capture, has_input, weights, norms, biases,
    rope, eps, num_kv_heads, pools, rows, geometry,
):  # fmt: skip
    """What one worker does of all layers; any number of workers may run this side by side."""
    normed, wide, q, mixed, act = work
    w_qkv, w_o, w_gate_up, w_down = weights
    norms_in, norms_post, q_norms, k_norms = norms
    pool_k, pool_v, scratch_k, scratch_v = pools
    positions, slots = rows
    mine = (
        key_work[0][worker], key_work[1][worker], key_work[2][worker], key_work[3][worker], key_work[4][worker],
        key_work[5][worker], key_work[6][worker], key_work[7][worker], key_work[8][worker], key_work[9][worker],
    )  # fmt: skip
    num_layers = w_qkv.shape[0]
    units = 1 if num_rows <= SERIAL_ROWS else UNITS_PER_WORKER * num_workers
    for layer in range(num_layers):
        phase = phases[layer]
        if layer in capture:
            _capture_phase(phase[8], units, residual, aux, capture, layer, num_rows)
        if not (layer == 0 and has_input):
            _norm_phase(phase[0], units, residual, norms_in[layer], eps, normed, num_rows)
        product_phase(phase[1], num_workers, w_qkv[layer], normed, wide, num_rows)
        k_new, v_new = scratch_k[layer], scratch_v[layer]
        _rope_phase(
            phase[2], units, num_rows, wide, biases[layer], (q_norms[layer], k_norms[layer]), eps, rope, positions,
            slots, q, k_new, v_new, num_kv_heads,
        )  # fmt: skip
        attention_phase(phase[3], q, mixed, (pool_k[layer], pool_v[layer], k_new, v_new), num_kv_heads, geometry, mine)
        _residual_phase(phase[4], num_workers, w_o[layer], mixed, wide, num_rows, residual)
        _norm_phase(phase[5], units, residual, norms_post[layer], eps, normed, num_rows)
        _gate_up_phase(phase[6], num_workers, w_gate_up[layer], normed, wide, num_rows, act)
        _residual_phase(phase[7], num_workers, w_down[layer], act, wide, num_rows, residual)
    if num_layers in capture:
        _capture_phase(phases[num_layers][8], units, residual, aux, capture, num_layers, num_rows)
    rest()


@njit(nogil=True, cache=True, parallel=True)
def run_layers(
    num_workers, phases, num_rows, residual, work, key_work, aux, capture, has_input, weights, norms, biases, rope, eps,
    num_kv_heads, pools, rows, geometry,
):  # fmt: skip
    """residual [R, H] fp32 in and out; weights [L, blocks, pairs, 32]; pools [L, S, Hk, D] bf16 bits.

    One parallel region for all layers: threads are woken once, what they do inside is claimed (cpu_claims).
    """
    for worker in prange(num_workers):
        _layers_share(
            worker, num_workers, phases, num_rows, residual, work, key_work, aux, capture, has_input, weights, norms,
            biases, rope, eps, num_kv_heads, pools, rows, geometry,
        )  # fmt: skip
