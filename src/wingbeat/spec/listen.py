"""listen: the drafter hears every committed row, in plain steps and prefill too, so it is never out of sync.

EAGLE-3's one layer makes its K/V entry from (fused feature of the row before, this token) without attention. So per
committed row only the fused feature and the K/V projection are computed. The entry of token j stands in slot j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows
from wingbeat.cache.pool import KVPool
from wingbeat.models.interface import Drafter
from wingbeat.runtime.lanes import Lanes


class Listener:
    """Keeps the drafter's pages, the lanes' carried features and each full page's last feature up to date."""

    def __init__(self, drafter: Drafter, pool: KVPool, lanes: Lanes, num_pages: int, page_size: int) -> None:
        self._drafter, self._pool = drafter, pool
        page_features = torch.zeros(num_pages, drafter.info.hidden_size, dtype=drafter.info.dtype)  # [pages, H]
        self._carried = CarriedFeatures(lanes.feature, page_features, page_size)

    @property
    def page_features(self) -> Tensor:
        """[pages, H]: of each full page's last row, where a prefix hit resumes."""
        return self._carried.pages

    def listen(self, rows: CommittedRows, aux: Tensor) -> None:
        """aux [R, A*H] of the whole block. Advances each lane's feature to its newest committed row."""
        self._drafter.listen(aux, rows, self._carried, self._pool)
