"""What the engine asks of models: a target that also shows aux features, and a drafter that listens and speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch, ForwardOutput
from wingbeat.cache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that others need."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    digest: str
    """sha256 over config and tensor bytes (first 16 hex digits); same weights, same digest."""


class TargetModel(Protocol):
    info: ModelInfo
    embedding: Tensor  # [V, H] model dtype

    def forward(self, batch: ForwardBatch, pool: KVPool, *, capture: tuple[int, ...] = ()) -> ForwardOutput: ...


class Drafter(Protocol):
    """EAGLE-3 (sec. 3): one decoder layer over [norm(embed(token)); norm(fused feature of the row before)].

    The entry of token j lives in slot j with RoPE position j-1 and is made from (aux features of row j-1, token j).
    """

    info: ModelInfo
    aux_layer_ids: tuple[int, ...]  # canonical: residual entering layer k (embedding output is 0)
    draft_vocab_size: int
    target_ids: Tensor  # [D] int64: draft id -> target id (absolute; d2t + arange)

    def fuse(self, aux: Tensor) -> Tensor:
        """[N, num_aux*H_target] -> [N, H]: fc over the (optionally normed) aux features."""
        ...

    def listen(self, aux: Tensor, rows: CommittedRows, carried: CarriedFeatures, pool: KVPool) -> None:
        """Writes the K/V entries of committed rows and carries their features on (kernels/interface.py, Listen)."""
        ...

    def forward(self, hidden: Tensor, batch: ForwardBatch, pool: KVPool) -> tuple[Tensor, Tensor]:
        """The whole layer. hidden [R, H]: fused feature of the row before (depth 1) or the previous level's output.

        Returns draft logits [R, D] float32 and the hidden state [R, H] that the next level takes.
        """
        ...
