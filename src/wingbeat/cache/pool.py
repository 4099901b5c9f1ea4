"""KVPool: the K/V storage of one model - pages that last and a scratch for the rows in flight.

Legend: L layers, S page slots (num_pages * page_size), M scratch rows, Hk K/V heads, D head dim.
Slot of position p of a sequence: page_table[p // page_size] * page_size + p % page_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPool:
    """Two regions with one layout. Only commit (and the drafter's listening) writes to the paged region."""

    k: Tensor  # [L, S, Hk, D]
    v: Tensor  # [L, S, Hk, D]
    scratch_k: Tensor  # [L, M, Hk, D]
    scratch_v: Tensor  # [L, M, Hk, D]

    @staticmethod
    def allocate(
        *,
        num_layers: int,
        num_slots: int,
        num_scratch_rows: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVPool:
        def region(rows: int) -> Tensor:
            # Zeros, not empty: a masked read of an unwritten slot must never meet a NaN.
            return torch.zeros(num_layers, rows, num_kv_heads, head_dim, dtype=dtype, device=device)

        return KVPool(region(num_slots), region(num_slots), region(num_scratch_rows), region(num_scratch_rows))

    @property
    def num_scratch_rows(self) -> int:
        return self.scratch_k.shape[1]

    def commit(self, scratch_rows: Tensor, slots: Tensor) -> None:
        """Copies accepted rows into their pages. scratch_rows, slots: [n] int64. Reads all before writing any."""
        self.k[:, slots] = self.scratch_k[:, scratch_rows]
        self.v[:, slots] = self.scratch_v[:, scratch_rows]
