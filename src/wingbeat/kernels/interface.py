"""What models ask of kernels: one stack of decoder layers, a head, and a few primitives.

Two siblings implement each protocol: `torch_*` (any device and dtype; the reference) and `cpu_*` (Numba, bf16, in place
on pages). `dispatch.py` picks one when a model is built. Weights are given in checkpoint layout and packed once.

Legend: R query rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, V vocab, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Sizes of a stack of equal decoder layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    input_size: int
    """Width of the qkv projection's input: hidden_size, or 2*hidden_size in EAGLE-3's drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer, checkpoint layout ([out, in]); q, k, v and gate, up concatenated along out."""

    input_norm: Tensor | None  # [H]; None when the caller norms the input itself (EAGLE-3)
    qkv: Tensor  # [(Hq + 2*Hk) * D, input_size]
    qkv_bias: Tensor | None  # [(Hq + 2*Hk) * D]  (Qwen2.5)
    q_norm: Tensor | None  # [D]  (Qwen3)
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, Hq * D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 * F, H]
    down: Tensor  # [H, F]


class DecoderStack(Protocol):
    """L pre-norm Llama layers: x += o(attn(norm(x))); x += down(silu(gate) * up)."""

    def forward(
        self,
        residual: Tensor,  # [R, H] model dtype
        batch: ForwardBatch,
        pool: KVPool,
        *,
        first_input: Tensor | None = None,  # [R, input_size], already normed; required when input_norm is None
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Residual after the last layer [R, H] (no final norm) and, for `capture`, the residual ENTERING each of those
        layers (id L = after the last one), concatenated: [R, len(capture) * H]. Writes each row's K/V to the scratch."""
        ...

    def write_kv(self, first_input: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Layer 0's K/V of the given rows straight into pages: listening. No attention, no o, no MLP.

        first_input [N, input_size] already normed, positions [N] int64 (RoPE), slots [N] int64.
        """
        ...


class Linear(Protocol):
    """y = x @ weight.T (+ bias), accumulated in float32, rounded once to x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [n, in] -> [n, out]


class Head(Protocol):
    """Final norm and output projection: [n, H] -> logits [n, V] float32 (float64 for float64 weights)."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


class KernelFactory(Protocol):
    """One backend. `rope` is (cos, sin), each [max_positions, D//2] float32, rotate-half convention."""

    name: str

    def stack(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> DecoderStack: ...
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...
    def head(self, norm: Tensor, eps: float, weight: Tensor) -> Head: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
