"""What models ask of kernels: one stack of decoder layers, a head, and a few primitives.

Two siblings implement each protocol: `torch_*` (any device and dtype; the reference) and `cpu_*` (Numba, bf16, in place
on pages). `dispatch.py` picks one when a model is built. Weights are given in checkpoint layout and packed once.

Legend: R query rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, V vocab, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch
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
        layers (id L = after the last one), concatenated: [R, len(capture) * H]. Writes each row's K/V to scratch."""
        ...


class Linear(Protocol):
    """y = x @ weight.T, accumulated in float32, rounded once to x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [n, in] -> [n, out]


class Head(Protocol):
    """Final norm and output projection: [n, H] -> logits [n, V] float32 (float64 for float64 weights)."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


class Norm(Protocol):
    """RMS norm of rows, computed in float32 (float64 for float64), rounded to x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...  # [n, H] -> [n, H]


class DraftInput(Protocol):
    """What an EAGLE-3 layer reads: [norm(embedding of the token); norm(hidden)], each half with its own weight."""

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor: ...  # [n] int64, [n, H] -> [n, 2 * H]


class Listen(Protocol):
    """The drafter hears committed rows: its K/V entries straight into pages. No attention, no o, no MLP."""

    def __call__(self, aux: Tensor, rows: CommittedRows, carried: CarriedFeatures, pool: KVPool) -> None:
        """Writes the entry of every row's token and carries the features on; at least one row.

        aux [R, A*H_target] of the whole block. A row's entry is made from its token and the fused feature of the row
        before it, with that row's RoPE position; position 0 has none before it, and nobody reads its entry.
        """
        ...


class KernelFactory(Protocol):
    """One backend. `rope` is (cos, sin), each [max_positions, D//2] float32, rotate-half convention."""

    name: str

    def stack(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> DecoderStack: ...
    def linear(self, weight: Tensor) -> Linear: ...
    def head(self, norm: Tensor, eps: float, weight: Tensor) -> Head: ...
    def norm(self, weight: Tensor, eps: float) -> Norm: ...
    def draft_input(self, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float) -> DraftInput: ...
    def listen(self, fuse: Linear, first_input: DraftInput, stack: DecoderStack) -> Listen:
        """Of parts that this factory made; `stack` has one layer."""
        ...
