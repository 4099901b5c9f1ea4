"""Block: the rows one target forward sees - roots, draft nodes and prefill chunks, packed sequence by sequence.

Decoding sequences come first; a parent stands before its children. Plain decoding is a block of roots.

Legend: B sequences, Bd decoding ones, C candidates (root is candidate 0), R rows, A deepest draft, W mask width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.kernels.rows_cpu import pack_rows
from wingbeat.runtime.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes a drafter proposed, parents before children; candidate 0 is the root."""

    token_ids: Tensor  # [Bd, C] int64 target ids
    parents: Tensor  # [Bd, C] int64 candidate index (the root's is ignored)
    depths: Tensor  # [Bd, C] int64, root 0
    scores: Tensor  # [Bd, C] float32 cumulative estimated acceptance, root 1; no child above its parent


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of known tokens: rows start .. start+num_rows-1 of the lane."""

    lane: int
    start: int
    num_rows: int
    samples: bool
    """The chunk ends at the newest known token, so its last row gives the next one."""


@dataclass(frozen=True, slots=True)
class Block:
    lanes: Tensor  # [B] int64
    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    parents: Tensor  # [R] int64 row of the parent; -1 for roots and for prefill rows
    cu_rows: Tensor  # [B+1] int32
    num_decode_seqs: int
    num_decode_rows: int
    max_depth: int
    samples: Tensor  # [B] bool: the sequence samples in this step
    sample_rows: Tensor  # [n] int64: every decoding row, then the last row of each sampling prefill
    sample_lanes: Tensor  # [n] int32
    ancestors: Tensor  # [n, A] int32 in-flight tokens on the path to each sampled row, -1 padded
    causal: Tensor | None  # [B] bool; None when every sequence is a chain
    mask: Tensor | None  # [R, W] bool

    @property
    def num_rows(self) -> int:
        return self.token_ids.numel()

    @property
    def rows_per_seq(self) -> Tensor:  # [B] int32
        return self.cu_rows.diff()

    def forward_batch(self, lanes: Lanes, page_size: int) -> ForwardBatch:
        """Geometry of the target's forward: row r uses scratch row r; logits only where something is sampled."""
        return ForwardBatch(
            input_ids=self.token_ids,
            positions=self.positions,
            cu_rows=self.cu_rows,
            key_starts=self.cu_rows[:-1],
            key_lens=self.rows_per_seq,
            scratch_slots=torch.arange(self.num_rows),
            context_lens=lanes.context_lens[self.lanes],
            page_table=lanes.page_table[self.lanes],
            page_size=page_size,
            causal=self.causal,
            mask=self.mask,
            logit_rows=self.sample_rows,
        )


def roots(lanes: Lanes, lane_ids: Tensor) -> Tensor:
    """Last known token of each lane, not yet forwarded: [Bd] int64."""
    return lanes.sampling.history[lane_ids, lanes.context_lens[lane_ids].long()].long()


def build_block(
    lanes: Lanes, decode: Tensor, candidates: Candidates | None, keep: Tensor | None, prefills: list[Prefill]
) -> Block:
    """Packs the kept candidates (None: just the roots) of lanes `decode` [Bd] and the prefill chunks."""
    num_decode = decode.numel()
    if candidates is None or keep is None:
        tokens = roots(lanes, decode)[:, None].numpy()
        zeros = np.zeros_like(tokens)
        packed = pack_rows(tokens, zeros, zeros, np.ones(tokens.shape, np.bool_), 0)
    else:
        depth = int(candidates.depths.max()) if candidates.depths.numel() else 0
        packed = pack_rows(
            candidates.token_ids.numpy(), candidates.parents.numpy(), candidates.depths.numpy(), keep.numpy(), depth
        )
    token_ids, parents, depths, cu_rows, mask, paths, chains = packed
    rows_per_seq = np.diff(cu_rows)
    context_lens = lanes.context_lens.numpy()
    decode_np = decode.numpy()
    positions = np.repeat(context_lens[decode_np], rows_per_seq) + depths
    lane_of_row = np.repeat(decode_np, rows_per_seq).astype(np.int32)
    num_rows = len(token_ids)
    if not prefills:
        return Block(
            lanes=decode,
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            parents=torch.from_numpy(parents),
            cu_rows=torch.from_numpy(cu_rows),
            num_decode_seqs=num_decode,
            num_decode_rows=num_rows,
            max_depth=paths.shape[1],
            samples=torch.ones(num_decode, dtype=torch.bool),
            sample_rows=torch.arange(num_rows),
            sample_lanes=torch.from_numpy(lane_of_row),
            ancestors=torch.from_numpy(paths),
            causal=None if chains else torch.zeros(num_decode, dtype=torch.bool),
            mask=None if chains else torch.from_numpy(mask),
        )
    return _append_prefills(
        lanes, decode_np, (token_ids, positions, parents, cu_rows, mask, paths), lane_of_row, chains, prefills
    )


def _append_prefills(
    lanes: Lanes,
    decode: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    lane_of_row: np.ndarray,
    chains: bool,
    prefills: list[Prefill],
) -> Block:
    token_ids, positions, parents, cu_rows, mask, paths = rows
    history = lanes.sampling.history.numpy()
    num_decode_rows, num_chunk_rows = len(token_ids), sum(p.num_rows for p in prefills)
    ends = num_decode_rows + np.cumsum([p.num_rows for p in prefills])
    sampling = [(int(end) - 1, p.lane) for end, p in zip(ends, prefills, strict=True) if p.samples]
    samples = np.array([True] * len(decode) + [p.samples for p in prefills])
    if not chains:
        mask = np.concatenate([mask, np.zeros((num_chunk_rows, mask.shape[1]), np.bool_)])
    no_path = np.full((len(sampling), paths.shape[1]), -1, np.int32)
    chunk_tokens = [history[p.lane, p.start : p.start + p.num_rows].astype(np.int64) for p in prefills]
    return Block(
        lanes=torch.from_numpy(np.concatenate([decode, np.array([p.lane for p in prefills])])),
        token_ids=torch.from_numpy(np.concatenate([token_ids, *chunk_tokens])),
        positions=torch.from_numpy(
            np.concatenate([positions, *(np.arange(p.start, p.start + p.num_rows) for p in prefills)])
        ),
        parents=torch.from_numpy(np.concatenate([parents, np.full(num_chunk_rows, -1)])),
        cu_rows=torch.from_numpy(np.concatenate([cu_rows, ends.astype(np.int32)])),
        num_decode_seqs=len(decode),
        num_decode_rows=num_decode_rows,
        max_depth=paths.shape[1],
        samples=torch.from_numpy(samples),
        sample_rows=torch.from_numpy(
            np.concatenate([np.arange(num_decode_rows), np.array([r for r, _ in sampling], np.int64)])
        ),
        sample_lanes=torch.from_numpy(
            np.concatenate([lane_of_row, np.array([lane for _, lane in sampling], np.int32)])
        ),
        ancestors=torch.from_numpy(np.concatenate([paths, no_path])),
        causal=None if chains else torch.from_numpy(np.arange(len(samples)) >= len(decode)),
        mask=None if chains else torch.from_numpy(mask),
    )
