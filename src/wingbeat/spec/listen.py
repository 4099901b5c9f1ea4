"""listen: the drafter hears every committed row, in plain steps and prefill too, so it is never out of sync.

EAGLE-3's one layer makes its K/V entry from (fused feature of the row before, this token) without attention. So per
committed row only the fused feature and the K/V projection are computed. The entry of token j stands in slot j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.models.interface import Drafter
from wingbeat.cache.pool import KVPool
from wingbeat.runtime.lanes import Lanes


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows whose K/V went to pages in this step, sequence by sequence, in position order."""

    block_rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    slots: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    seqs: Tensor  # [n] int64 index of the block's sequence
    lanes: Tensor  # [n] int64
    before: Tensor  # [n] int64 index of the row before it in this list, -1: it is the lane's carried feature


class Listener:
    """Keeps the drafter's pages, the lanes' carried features and each full page's last feature up to date."""

    def __init__(self, drafter: Drafter, pool: KVPool, num_pages: int, page_size: int) -> None:
        self._drafter, self._pool, self._page_size = drafter, pool, page_size
        info = drafter.info
        self.page_features = torch.zeros(num_pages, info.hidden_size, dtype=info.dtype)  # [pages, H]

    def listen(self, rows: CommittedRows, aux: Tensor, lanes: Lanes) -> None:
        """aux: [R, num_aux*H] of the whole block. Advances lanes.feature to each lane's newest committed row."""
        if rows.slots.numel() == 0:
            return
        fused = self._drafter.fuse(aux[rows.block_rows])  # [n, H]
        carried = rows.before < 0
        before = fused[rows.before]
        before[carried] = lanes.feature[rows.lanes[carried]]
        # Position 0 has no row before it; its slot 0 is never read (context_start 1), so any feature will do.
        self._drafter.listen(before, rows.token_ids, (rows.positions - 1).clamp(min=0), rows.slots, self._pool)
        newest = torch.cat([carried[1:], carried.new_ones(1)])
        lanes.feature[rows.lanes[newest]] = fused[newest]
        full = rows.positions % self._page_size == self._page_size - 1
        self.page_features[rows.slots[full] // self._page_size] = fused[full]
