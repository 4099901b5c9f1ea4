"""accept: sample the target at every row with the shared dice, follow the matching branch, advance the lanes.

Lossless for any way of drafting, pruning or switching, because the token at a position depends only on the target's
distribution there and on noise keyed by (seed, choice, position) (DESIGN section 3, drafter-invariant sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.batch import CommittedRows
from wingbeat.kernels.rows_cpu import accept_rows
from wingbeat.runtime.lanes import Lanes
from wingbeat.spec.block import Block


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one step gave each sequence of the block."""

    token_ids: Tensor  # [B, A+1] int64, -1 padded
    counts: Tensor  # [B] int64 new tokens, after truncation
    matched: Tensor  # [B] int64 accepted drafts before truncation (what acceptance statistics count)
    rows: CommittedRows


def accept(block: Block, sampled: Tensor, lanes: Lanes, page_size: int) -> Accepted:
    """`sampled` [n] int64: the target's token at each of block.sample_rows. Advances lengths and histories in place."""
    by_row = torch.full((block.num_rows,), -1, dtype=torch.int64)
    by_row[block.sample_rows] = sampled
    tokens, counts, matched, rows, slots, positions, seqs, before = accept_rows(
        block.lanes.numpy(),
        block.cu_rows.numpy(),
        block.parents.numpy(),
        block.token_ids.numpy(),
        by_row.numpy(),
        block.samples.numpy(),
        block.num_decode_seqs,
        block.max_depth,
        lanes.sampling.history.numpy(),
        lanes.sampling.history_lens.numpy(),
        lanes.context_lens.numpy(),
        lanes.end_ids.numpy(),
        lanes.max_lens.numpy(),
        lanes.finished.numpy(),
        lanes.page_table.numpy(),
        page_size,
    )
    block_rows, seq_ids = torch.from_numpy(rows), torch.from_numpy(seqs)
    committed = CommittedRows(
        block_rows=block_rows,
        token_ids=block.token_ids[block_rows],
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        seqs=seq_ids,
        lanes=block.lanes[seq_ids],
        before=torch.from_numpy(before),
    )
    return Accepted(torch.from_numpy(tokens), torch.from_numpy(counts), torch.from_numpy(matched), committed)
