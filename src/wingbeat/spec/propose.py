"""propose: the drafter speaks, level by level, and its nodes compete for the draft rows.

    level 1    one row per sequence: (newest fused feature, root)         -> topk children of the root
    level 2..  topk rows per sequence: (output of the parent, its token)  -> topk children each; the best go on

Chain is topk 1. Slots, tokens and positions as in models/interface.py: the row of token j has RoPE position j-1.

Legend: Bd decoding sequences, K topk, C candidates, W in-flight keys of one sequence (1 + K per later level).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.sampling import Sampler
from wingbeat.models.interface import Drafter
from wingbeat.runtime.lanes import Lanes
from wingbeat.spec.block import Candidates, roots
from wingbeat.spec.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Speaker:
    """The drafter with its K/V pool: everything proposing needs besides the lanes."""

    drafter: Drafter
    pool: KVPool
    sampler: Sampler
    page_size: int


@dataclass(frozen=True, slots=True)
class _Level:
    """Geometry of one level for a batch size; equal for every step, hence cached."""

    cu_rows: Tensor  # [Bd+1] int32
    key_starts: Tensor  # [Bd] int32
    key_lens: Tensor  # [Bd] int32
    scratch_slots: Tensor  # [Bd*w] int64
    row_seq: Tensor  # [Bd*w] int64
    depths: Tensor  # [Bd, w*K] int64, of the children
    chain_index: Tensor  # [Bd, 1] int64: candidate index of the child of a chain
    all_masked: Tensor  # [Bd] bool: no sequence is causal


@lru_cache(maxsize=4096)
def _level(num_seqs: int, level: int, topk: int, depth: int) -> _Level:
    stride = 1 + topk * (depth - 1)
    rows, first = (1, 0) if level == 1 else (topk, 1 + topk * (level - 2))
    starts = torch.arange(num_seqs, dtype=torch.int32) * stride
    slots = starts.long()[:, None] + first + torch.arange(rows)
    return _Level(
        cu_rows=torch.arange(num_seqs + 1, dtype=torch.int32) * rows,
        key_starts=starts,
        key_lens=torch.full((num_seqs,), first + rows, dtype=torch.int32),
        scratch_slots=slots.reshape(-1),
        row_seq=torch.arange(num_seqs).repeat_interleave(rows),
        depths=torch.full((num_seqs, rows * topk), level),
        chain_index=torch.full((num_seqs, 1), level),
        all_masked=torch.zeros(num_seqs, dtype=torch.bool),
    )


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The nodes that speak next: w per sequence (1 root, then topk)."""

    tokens: Tensor  # [Bd, w] int64
    hidden: Tensor  # [Bd*w, H] what the drafter reads beside the token
    scores: Tensor  # [Bd, w] float32 cumulative estimated acceptance
    index: Tensor  # [Bd, w] int64 candidate index
    seen: Tensor | None  # [Bd, w, W] in-flight keys each may see, itself included; None in chains


@dataclass(frozen=True, slots=True)
class _Children:
    """What a frontier proposed: topk children of each of its w nodes."""

    tokens: Tensor  # [Bd, w*K] int64
    parents: Tensor  # [Bd, w*K] int64 candidate index
    scores: Tensor  # [Bd, w*K] float32
    hidden: Tensor  # [Bd*w, H] output of the speaking rows


@dataclass(frozen=True, slots=True)
class _Context:
    """What all levels of one step share, gathered once."""

    lanes: Tensor  # [Bd] int64
    lens: Tensor  # [Bd] int32
    page_table: Tensor  # [Bd, P] int32


def propose(speaker: Speaker, lanes: Lanes, decode: Tensor, plan: StepPlan) -> Candidates:
    """Draft candidates of depth 1..plan.depth for lanes `decode` [Bd]; the lanes are not changed."""
    context = _Context(decode, lanes.context_lens[decode], lanes.page_table[decode])
    root = roots(lanes, decode)[:, None]
    zero, one = torch.zeros_like(root), torch.ones(root.shape)
    seen = None if plan.topk == 1 else torch.ones(root.shape[0], 1, 1, dtype=torch.bool)
    frontier = _Frontier(root, lanes.feature[decode], one, zero, seen)
    tokens, parents, depths, scores, count = [root], [zero], [zero], [one], 1
    for depth in range(1, plan.depth + 1):
        level = _level(root.shape[0], depth, plan.topk, plan.depth)
        children = _speak(speaker, lanes, context, plan.topk, depth, level, frontier)
        tokens.append(children.tokens)
        parents.append(children.parents)
        depths.append(level.depths)
        scores.append(children.scores)
        if depth < plan.depth:
            advance = _advance_chain if plan.topk == 1 else _advance_tree
            frontier = advance(frontier, children, level, count)
        count += children.tokens.shape[1]
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(scores, 1))


def _speak(
    speaker: Speaker, lanes: Lanes, context: _Context, topk: int, depth: int, level: _Level, frontier: _Frontier
) -> _Children:
    """One drafter forward over the frontier."""
    num_seqs, width = frontier.tokens.shape
    own_position = context.lens.long()[level.row_seq] + (depth - 1)
    batch = ForwardBatch(
        input_ids=frontier.tokens.reshape(-1),
        positions=own_position - 1,
        cu_rows=level.cu_rows,
        key_starts=level.key_starts,
        key_lens=level.key_lens,
        scratch_slots=level.scratch_slots,
        context_lens=context.lens,
        page_table=context.page_table,
        page_size=speaker.page_size,
        context_start=1,
        causal=None if frontier.seen is None else level.all_masked,
        mask=None if frontier.seen is None else frontier.seen.reshape(num_seqs * width, -1),
    )
    logits, hidden = speaker.drafter.forward(frontier.hidden, batch, speaker.pool)
    ids, chance = speaker.sampler.propose_topk(
        logits, speaker.drafter.target_ids, lanes.sampling, context.lanes[level.row_seq], own_position + 1, topk
    )
    return _Children(
        tokens=ids.view(num_seqs, -1),
        parents=frontier.index.repeat_interleave(topk, 1),
        scores=(frontier.scores[:, :, None] * chance.view(num_seqs, width, topk)).view(num_seqs, -1),
        hidden=hidden,
    )


def _advance_chain(frontier: _Frontier, children: _Children, level: _Level, count: int) -> _Frontier:
    """The only child goes on."""
    return _Frontier(children.tokens, children.hidden, children.scores, level.chain_index, None)


def _advance_tree(frontier: _Frontier, children: _Children, level: _Level, count: int) -> _Frontier:
    """The topk children with the best cumulative score go on. `count` candidates came before them."""
    num_seqs, width = frontier.tokens.shape
    topk = children.tokens.shape[1] // width
    best = children.scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]  # [Bd, K]
    source = best // topk  # [Bd, K] frontier node each one hangs from
    rows = (torch.arange(num_seqs)[:, None] * width + source).reshape(-1)
    assert frontier.seen is not None
    inherited = frontier.seen.reshape(num_seqs * width, -1)[rows].view(num_seqs, topk, -1)
    itself = torch.eye(topk, dtype=torch.bool).expand(num_seqs, -1, -1)
    return _Frontier(
        tokens=children.tokens.gather(1, best),
        hidden=children.hidden[rows],
        scores=children.scores.gather(1, best),
        index=count + best,
        seen=torch.cat([inherited, itself], 2),
    )


def keep_best(candidates: Candidates, nodes: int, depth_caps: Tensor | None = None) -> Tensor:
    """Which candidates get rows: [Bd, C] bool, root and `nodes`-1 best of each sequence, closed under ancestors.

    Order: score, then shallower, then index; candidates stand level by level and a child never scores above its parent,
    so a stable sort keeps every parent before its children. `depth_caps` [Bd]: deepest draft a request allows.
    """
    scores = candidates.scores
    if nodes >= scores.shape[1]:
        keep = torch.ones(scores.shape, dtype=torch.bool)
    else:
        order = scores.sort(dim=1, descending=True, stable=True).indices
        keep = torch.zeros(scores.shape, dtype=torch.bool)
        keep.scatter_(1, order[:, :nodes], True)
    if depth_caps is not None:
        keep &= candidates.depths <= depth_caps[:, None]
    return keep
