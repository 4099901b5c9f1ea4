"""Products of rows with packed weights, shared by threads in claimed units (Numba).

Legend: R rows, K inner size, O outputs.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit, prange

from wingbeat.kernels.cpu_claims import claim, finish, wait_all
from wingbeat.kernels.cpu_math import BLOCK, from_bf16, gemm, granule, norm_row, rest, to_bf16

UNITS_PER_WORKER = 2


@njit(nogil=True, cache=True)
def shares(num_blocks, tile, num_workers):
    """How many units a product is claimed in: two per worker, none smaller than a tile."""
    return max(1, min(UNITS_PER_WORKER * num_workers, num_blocks // tile))


@njit(nogil=True, cache=True)
def blocks(unit, num_units, num_blocks, tile):
    """First and last block of a unit, multiples of the tile as far as possible."""
    tiles = num_blocks // tile
    first, last = unit * tiles // num_units * tile, (unit + 1) * tiles // num_units * tile
    return first, num_blocks if unit == num_units - 1 else last


@njit(nogil=True, cache=True)
def gemm_blocks(w, first, last, x, y, num_rows):
    gemm(w.ctypes.data, first, last, w.shape[1], x.ctypes.data, x.shape[1] * 2, y.ctypes.data, y.shape[1] * 4, num_rows)


@njit(nogil=True, cache=True)
def product_phase(phase, num_workers, w, x, y, num_rows):
    """y = x . w"""
    tile = granule(num_rows)
    units = shares(w.shape[0], tile, num_workers)
    unit = claim(phase)
    while unit < units:
        first, last = blocks(unit, units, w.shape[0], tile)
        gemm_blocks(w, first, last, x, y, num_rows)
        finish(phase)
        unit = claim(phase)
    wait_all(phase, units)


@njit(nogil=True, cache=True)
def _product_share(phase, num_workers, w, x, y, num_rows):
    product_phase(phase, num_workers, w, x, y, num_rows)
    rest()


@njit(nogil=True, cache=True, parallel=True)
def product(phase, num_workers, w, x, y, num_rows):
    """y [R+tile, >= O] fp32 = x [R+tile, K] bf16 bits times packed w."""
    for _ in prange(num_workers):
        _product_share(phase, num_workers, w, x, y, num_rows)


@njit(nogil=True, cache=True)
def _round_columns(y, out, num_rows, first_block, last_block):
    last = min(last_block * BLOCK, out.shape[1])
    for r in range(num_rows):
        for i in range(first_block * BLOCK, last):
            out[r, i] = to_bf16(y[r, i])


@njit(nogil=True, cache=True)
def _linear_share(phase, num_workers, w, x, y, num_rows, out):
    tile = granule(num_rows)
    units = shares(w.shape[0], tile, num_workers)
    unit = claim(phase)
    while unit < units:
        first, last = blocks(unit, units, w.shape[0], tile)
        gemm_blocks(w, first, last, x, y, num_rows)
        _round_columns(y, out, num_rows, first, last)
        unit = claim(phase)
    rest()


@njit(nogil=True, cache=True, parallel=True)
def linear(phase, num_workers, w, x, y, num_rows, out):
    """out [R, O] bf16 bits = x [R+tile, K] bf16 bits times packed w, by way of y [R+tile, >= O] fp32."""
    for _ in prange(num_workers):
        _linear_share(phase, num_workers, w, x, y, num_rows, out)


@njit(nogil=True, cache=True)
def norm_bits(x, weight, eps, out, num_rows):
    """Norm of bf16 rows into bf16 rows."""
    row = np.empty(x.shape[1], np.float32)
    for r in range(num_rows):
        for i in range(x.shape[1]):
            row[i] = from_bf16(x[r, i])
        norm_row(row, weight, eps, out[r])
