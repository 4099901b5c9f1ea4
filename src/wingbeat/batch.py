"""ForwardBatch: the geometry of one forward, the only thing a model is told.

Each query row sees its sequence's committed context (in pages) plus the in-flight rows its mask allows
(in the step scratch). Plain decode is 1 row per sequence, chain verify k+1 causal rows, tree verify n rows with an
ancestor mask, a draft level topk rows, prefill many causal rows. There is no mode.

Legend: B sequences, R query rows, W mask width (in-flight keys), P pages per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Rows of sequence b are cu_rows[b]:cu_rows[b+1]; its in-flight keys are
    scratch[key_starts[b] : key_starts[b] + key_lens[b]], of which its rows are the last ones.

    A row's K/V is written to scratch_slots[row] before attention reads it. Committed entries visible to every row of
    sequence b are positions context_start .. context_lens[b]-1 of its page table.
    """

    input_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64, RoPE positions
    cu_rows: Tensor  # [B+1] int32
    key_starts: Tensor  # [B] int32
    key_lens: Tensor  # [B] int32
    scratch_slots: Tensor  # [R] int64
    context_lens: Tensor  # [B] int32
    page_table: Tensor  # [B, P] int32
    page_size: int
    context_start: int = 0  # the drafter's first entry sits in slot 1 (DESIGN section 3, prefix reuse)
    causal: Tensor | None = None  # [B] bool: True ignores `mask`, row i sees in-flight keys up to itself; None = all
    mask: Tensor | None = None  # [R, W] bool over the sequence's own in-flight keys, self included
    logit_rows: Tensor | None = None  # [n] int64 rows whose logits are wanted; None = all rows

    def __post_init__(self) -> None:
        num_seqs, num_rows = self.cu_rows.numel() - 1, self.input_ids.numel()
        for name, tensor, shape, dtype in (
            ("positions", self.positions, (num_rows,), torch.int64),
            ("scratch_slots", self.scratch_slots, (num_rows,), torch.int64),
            ("cu_rows", self.cu_rows, (num_seqs + 1,), torch.int32),
            ("key_starts", self.key_starts, (num_seqs,), torch.int32),
            ("key_lens", self.key_lens, (num_seqs,), torch.int32),
            ("context_lens", self.context_lens, (num_seqs,), torch.int32),
        ):
            assert tensor.shape == shape and tensor.dtype == dtype, f"{name}: {tuple(tensor.shape)} {tensor.dtype}"
        assert self.page_table.shape[0] == num_seqs and self.page_table.dtype == torch.int32
        assert (self.mask is None) == (self.causal is None)

    @property
    def num_rows(self) -> int:
        return self.input_ids.numel()

    @property
    def num_seqs(self) -> int:
        return self.context_lens.numel()


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """logits of the wanted rows and the aux features of every row (None where the model captures none)."""

    logits: Tensor  # [n, V] float32 (float64 for float64 models)
    aux: Tensor | None  # [R, num_aux*H] model dtype


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows whose K/V went to pages in one step, sequence by sequence, in position order."""

    block_rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    slots: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    seqs: Tensor  # [n] int64 index of the block's sequence
    lanes: Tensor  # [n] int64
    before: Tensor  # [n] int64 index of the row before it in this list, -1: it was committed in an earlier step


@dataclass(frozen=True, slots=True)
class CarriedFeatures:
    """Fused features kept from step to step: of each lane's newest committed row, and of each full page's last row."""

    lanes: Tensor  # [S, H]
    pages: Tensor  # [pages, H]
    page_size: int
