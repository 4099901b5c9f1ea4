"""The draft vocabulary: which target token each draft id means, and the checks that make d2t and t2d agree.

Legend: D draft vocab, V target vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.errors import CheckpointError


def target_ids_from_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """[D] int64 absolute target ids from d2t's offsets (target id = draft id + offset)."""
    ids = torch.arange(d2t.numel(), dtype=torch.int64) + d2t.to(torch.int64).cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(
            f"d2t: target ids (draft id + offset) run from {int(ids.min())} to {int(ids.max())}, "
            f"expected 0..{vocab_size - 1}"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        at = int((ids[1:] <= ids[:-1]).nonzero()[0]) + 1
        raise CheckpointError(f"d2t: target ids must rise with the draft id; draft id {at} maps to {int(ids[at])}")
    return ids


def check_mask(t2d: Tensor, target_ids: Tensor) -> None:
    """CheckpointError unless t2d [V] marks exactly the tokens in target_ids [D]."""
    marked = t2d.cpu().to(torch.bool)
    wrong = int((~marked[target_ids]).sum())
    if wrong or int(marked.sum()) != target_ids.numel():
        raise CheckpointError(
            f"t2d marks {int(marked.sum())} tokens, d2t maps {target_ids.numel()}, of which {wrong} are unmarked: "
            "they must name the same tokens"
        )
