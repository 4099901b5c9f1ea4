"""Rotary position embedding: its settings, read from config.json, and the cos/sin tables kernels look up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wingbeat.models.fields import Fields

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """RoPE frequencies: plain, divided by a factor (linear), or Llama 3.1's wavelength-dependent division."""

    theta: float = DEFAULT_THETA
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def read_rope(fields: Fields) -> RopeConfig:
    """RoPE settings from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.origin)
    theta = section.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    for owner in (section, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise owner.refusal("partial_rotary_factor", "only 1.0 (every head dimension is rotated)")
    kind_field = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(kind_field, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=section.number("factor"))
    if kind == "llama3":
        return _read_llama3(section, theta, fields.integer("max_position_embeddings"))
    raise section.refusal(kind_field, "expected default, linear or llama3")


def _read_llama3(section: Fields, theta: float, max_positions: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_positions=section.integer("original_max_position_embeddings", max_positions),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, [head_dim // 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    return _llama3_frequencies(rope, plain)


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 1 = short wavelength, 0 = long
    return kept * plain + (1 - kept) * plain / rope.factor


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [num_positions, head_dim // 2] float32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)
