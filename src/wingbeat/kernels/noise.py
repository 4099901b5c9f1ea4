"""Counter-based Gumbel noise: the dice that target and drafter share (DESIGN section 3).

g(key, position, token) is a function of its arguments alone: no state, any order, any subset. Integers are mixed with a
32-bit finaliser with low avalanche bias (two multiply-xorshift rounds), once per (key, position) and twice per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
GOLDEN32, GOLDEN64 = 0x9E3779B1, 0x9E3779B97F4A7C15
MUL_A, MUL_B = 0x7FEB352D, 0x846CA68B


def noise_key(seed: int, choice_index: int) -> int:
    """The key of one choice of one request, as a signed 64-bit integer (splitmix64 over seed and choice)."""
    x = (seed + GOLDEN64 * (choice_index + 1)) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def _mix(x: Tensor) -> Tensor:
    """32-bit finaliser on int64 tensors that hold uint32 values."""
    x = x ^ (x >> 16)
    x = (x * MUL_A) & MASK32
    x = x ^ (x >> 15)
    x = (x * MUL_B) & MASK32
    return x ^ (x >> 16)


def noise_bits(key: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Uniform 32-bit integers, int64, broadcast over the arguments (all int64)."""
    low, high = key & MASK32, (key >> 32) & MASK32
    first = _mix(((position & MASK32) * GOLDEN32 & MASK32) ^ low)
    first = _mix((first + high) & MASK32)
    second = _mix(first ^ GOLDEN32)
    return _mix((_mix(((token_ids * GOLDEN32) & MASK32) ^ first) + second) & MASK32)


def gumbel(key: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, broadcast over the arguments."""
    uniform = (noise_bits(key, position, token_ids).to(torch.float64) + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))
