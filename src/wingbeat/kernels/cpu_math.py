"""Row-wise maths and the packed matrix product of the cpu backend (Numba).

Every function computes one row from that row alone, in a fixed order. x_step and y_step are bytes between rows.

Legend: R rows, H hidden, D head dim, K inner size, O outputs.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from wingbeat.kernels.cpu_amx import MOST_ROWS, STRIP, TILE_CONFIGS, amx_tile, configure, release
from wingbeat.kernels.cpu_ir import bits_float, float_bits, gemm_tile
from wingbeat.kernels.jit import HAS_AMX

BLOCK = 16
ROW_TILE = 8
"""Rows of work buffers are padded to this, so that a tile may compute (and drop) rows nobody asked for."""

_TILE_1X8, _TILE_1X4, _TILE_1X1 = gemm_tile(1, 8), gemm_tile(1, 4), gemm_tile(1, 1)
_TILE_1X2 = gemm_tile(1, 2)
_TILE_2X8, _TILE_2X2, _TILE_2X1 = gemm_tile(2, 8), gemm_tile(2, 2), gemm_tile(2, 1)
_TILE_4X6, _TILE_4X2 = gemm_tile(4, 6), gemm_tile(4, 2)
_TILE_4X1 = gemm_tile(4, 1)
_TILE_8X3, _TILE_8X1 = gemm_tile(8, 3), gemm_tile(8, 1)
_AMX_1X1, _AMX_1X2, _AMX_2X1, _AMX_2X2 = amx_tile(1, 1), amx_tile(1, 2), amx_tile(2, 1), amx_tile(2, 2)


def pack(weight: Tensor) -> np.ndarray:
    """[O, K] bf16 -> 64-byte aligned [ceil(O/16), K/2, 16, 2] int16: lane = output, neighbouring k as pairs."""
    outputs, inner = weight.shape
    padded = torch.zeros(-(-outputs // BLOCK) * BLOCK, inner + inner % 2, dtype=torch.bfloat16)
    padded[:outputs, :inner] = weight
    blocks = padded.view(torch.int16).reshape(-1, BLOCK, padded.shape[1] // 2, 2).permute(0, 2, 1, 3)
    return aligned(blocks.contiguous().numpy())


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose data starts at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@njit(inline="always")
def to_bf16(value):
    """fp32 -> bf16 bits, round to nearest even."""
    bits = float_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def from_bf16(bits):
    return bits_float(np.uint32(bits) << np.uint32(16))


@njit(inline="always")
def exp(x):
    """e**x for x <= 0 in fp32, relative error below 3e-7: 2**n times a degree-6 polynomial on [-ln2/2, ln2/2]."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * bits_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@njit(fastmath=True, nogil=True, cache=True)
def norm_row(x, weight, eps, out):
    """x / rms(x) * weight as bf16. x [H] fp32, weight [H] fp32, out [H] uint16."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = to_bf16(x[i] * scale * weight[i])


@njit(fastmath=True, nogil=True, cache=True)
def norm_head(x, weight, eps):
    """The same in place and in fp32, for one query or key head."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        x[i] = x[i] * scale * weight[i]


@njit(fastmath=True, nogil=True, cache=True)
def rotate_head(x, cos, sin):
    """Rotary embedding in place, rotate-half convention. x [D] fp32; cos, sin [D//2] fp32."""
    half = cos.shape[0]
    for i in range(half):
        low, high = x[i], x[half + i]
        x[i] = low * cos[i] - high * sin[i]
        x[half + i] = high * cos[i] + low * sin[i]


@njit(nogil=True, cache=True)
def granule(num_rows):
    """Blocks that a share of a product is best a multiple of: the width of the tile used for so many rows."""
    if HAS_AMX or num_rows <= 2:
        return 2
    return 6 if num_rows <= 4 else 3


@njit(nogil=True, cache=True)
def gemm(w, first, last, pairs, x, x_step, y, y_step, num_rows):
    """Output blocks first..last-1 of y = x @ w.T: x bf16, w packed, y fp32, all raw addresses.

    Rows are padded up to a tile; y and x must have room for ROW_TILE more rows than num_rows.
    """
    step = pairs * 64
    if HAS_AMX and pairs % 16 == 0:
        _gemm_amx(w, first, last, step, pairs // 16, x, x_step, y, y_step, num_rows)
    elif num_rows == 1:
        _gemm_row(w, first, last, step, pairs, x, x_step, y, y_step)
    elif num_rows == 2:
        _gemm_rows2(w, first, last, step, pairs, x, x_step, y, y_step)
    elif num_rows <= 4:
        _gemm_rows4(w, first, last, step, pairs, x, x_step, y, y_step)
    else:
        _gemm_many(w, first, last, step, pairs, x, x_step, y, y_step, num_rows)


@njit(nogil=True, cache=True)
def rest():
    """After a thread's last product: switching threads need not save its tiles."""
    if HAS_AMX:
        release()


@njit(nogil=True, cache=True)
def _gemm_amx(w, first, last, step, chunks, x, x_step, y, y_step, num_rows):
    """Whole pairs of strips first, then the rows that are left, which need tiles of another shape."""
    whole = num_rows // MOST_ROWS * MOST_ROWS
    if whole:
        configure(TILE_CONFIGS[MOST_ROWS].ctypes.data)
        for n in range(first, last, 2):  # two weight blocks stay in the first cache while all rows pass by
            for row in range(0, whole, MOST_ROWS):
                xs, out = x + row * x_step, y + row * y_step + n * 64
                _strips(w + n * step, min(last - n, 2), step, xs, x_step, out, y_step, chunks, True)
    rest_rows = num_rows - whole
    if rest_rows:
        configure(TILE_CONFIGS[rest_rows].ctypes.data)
        xs, ys = x + whole * x_step, y + whole * y_step
        for n in range(first, last, 2):
            _strips(w + n * step, min(last - n, 2), step, xs, x_step, ys + n * 64, y_step, chunks, rest_rows > STRIP)


@njit(nogil=True, cache=True)
def _strips(w, num_blocks, step, x, x_step, y, y_step, chunks, two):
    if two:
        if num_blocks == 2:
            _AMX_2X2(w, step, x, x_step, y, y_step, chunks)
        else:
            _AMX_2X1(w, step, x, x_step, y, y_step, chunks)
    elif num_blocks == 2:
        _AMX_1X2(w, step, x, x_step, y, y_step, chunks)
    else:
        _AMX_1X1(w, step, x, x_step, y, y_step, chunks)


@njit(nogil=True, cache=True)
def _gemm_row(w, first, last, step, pairs, x, x_step, y, y_step):
    n = first
    while n < last:
        if n + 8 <= last:
            _TILE_1X8(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 8
        elif n + 4 <= last:
            _TILE_1X4(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 4
        elif n + 2 <= last:
            _TILE_1X2(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 2
        else:
            _TILE_1X1(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 1


@njit(nogil=True, cache=True)
def _gemm_rows2(w, first, last, step, pairs, x, x_step, y, y_step):
    n = first
    while n < last:
        if n + 8 <= last:
            _TILE_2X8(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 8
        elif n + 2 <= last:
            _TILE_2X2(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 2
        else:
            _TILE_2X1(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 1


@njit(nogil=True, cache=True)
def _gemm_rows4(w, first, last, step, pairs, x, x_step, y, y_step):
    n = first
    while n < last:
        if n + 6 <= last:
            _TILE_4X6(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 6
        elif n + 2 <= last:
            _TILE_4X2(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 2
        else:
            _TILE_4X1(w + n * step, step, x, x_step, y + n * 64, y_step, pairs)
            n += 1


@njit(nogil=True, cache=True)
def _gemm_many(w, first, last, step, pairs, x, x_step, y, y_step, num_rows):
    """Three weight blocks stay in the first cache while all rows pass by."""
    n = first
    while n < last:
        wide = n + 3 <= last
        for m in range(0, num_rows, 8):
            out = y + m * y_step + n * 64
            if wide:
                _TILE_8X3(w + n * step, step, x + m * x_step, x_step, out, y_step, pairs)
            else:
                _TILE_8X1(w + n * step, step, x + m * x_step, x_step, out, y_step, pairs)
        n += 3 if wide else 1
