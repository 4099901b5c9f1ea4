"""One step, one shape of data (DESIGN section 4):

    block    = propose(batch, plan)          depth 0: the roots; else drafter levels -> candidates -> best rows
    out      = target(block)                 logits of sampled rows, aux features of every row
    accepted = accept(out.logits, block)     sample with the shared dice, follow the matching branch
    commit(accepted)                         accepted rows' K/V into pages, lengths advanced
    listen(accepted, out.aux)                the drafter's K/V of every committed row

`Stepper.run` works on lanes and pages alone; it never touches the scheduler's objects and returns what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.cache.pool import KVPool
from wingbeat.kernels.sampling import Sampler, SamplingRows
from wingbeat.models.interface import TargetModel
from wingbeat.runtime.lanes import Lanes
from wingbeat.spec.accept import Accepted, accept
from wingbeat.spec.block import Block, Prefill, build_block
from wingbeat.spec.listen import Listener
from wingbeat.spec.plan import Rule
from wingbeat.spec.propose import Speaker, keep_best, propose
from wingbeat.types import TokenLogprob

Paths = Sequence[Sequence[int]]
Constraint = Callable[[Paths], NDArray[np.int32]]
"""In-flight token paths from the root -> allowed-token bit masks [len(paths), ceil(V/32)] int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What the host decided. `decode` are lanes; `depth_caps` the deepest draft each of them may have."""

    decode: Sequence[int]
    prefills: list[Prefill]
    rule: Rule
    depth_caps: Sequence[int]
    probe: bool = False
    """Let the drafter guess one token per sequence without verifying it (keeps acceptance estimates alive)."""
    constraints: Mapping[int, Constraint] | None = None
    """By lane."""
    logprobs: dict[int, int] | None = None
    """Lane -> number of alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step by part."""

    draft: float
    verify: float
    accept: float
    listen: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.accept + self.listen


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did, per sequence of decode + prefills, as host lists."""

    tokens: list[list[int]]
    """New tokens, already cut at the first end and at max_len."""
    num_committed: list[int]
    """Rows whose K/V went to pages."""
    matched: list[int]
    """Accepted drafts before that cut."""
    num_drafts: list[int]
    draft_depth: list[int]
    failed: list[bool]
    """The target's logits were not finite."""
    logprobs: list[list[TokenLogprob]]
    probe_hits: list[bool] | None
    """Per decoding sequence: the probe's guess was what the target sampled."""
    num_rows: int
    times: StepTimes


class Stepper:
    """Target, drafter and pools of one device, and the step over them."""

    def __init__(
        self,
        *,
        target: TargetModel,
        pool: KVPool,
        lanes: Lanes,
        sampler: Sampler,
        page_size: int,
        speaker: Speaker | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.lanes = lanes
        self.listener = listener
        self.target = target
        self._pool, self._sampler, self._page_size = pool, sampler, page_size
        self._speaker = speaker
        self._capture = speaker.drafter.aux_layer_ids if speaker is not None else ()

    @property
    def has_drafter(self) -> bool:
        return self._speaker is not None

    @property
    def max_rows(self) -> int:
        """Rows one step can hold in flight."""
        return self._pool.num_scratch_rows

    def run(self, step: StepInput) -> StepResult:
        started = perf_counter()
        decode = torch.tensor(step.decode, dtype=torch.int64)
        block = self._propose(decode, step)
        guesses = self._probe(decode) if step.probe else None
        proposed = perf_counter()
        out = self.target.forward(block.forward_batch(self.lanes, self._page_size), self._pool, capture=self._capture)
        verified = perf_counter()
        sampled, failed, logprob_of = self._sample(block, out.logits, step)
        accepted = accept(block, sampled, self.lanes, self._page_size)
        self._pool.commit(accepted.rows.block_rows, accepted.rows.slots)
        chosen = perf_counter()
        if self.listener is not None and out.aux is not None:
            self.listener.listen(accepted.rows, out.aux)
        done = perf_counter()
        times = StepTimes(
            draft=proposed - started, verify=verified - proposed, accept=chosen - verified, listen=done - chosen
        )
        return _result(block, accepted, sampled, failed, logprob_of, guesses, times)

    def _propose(self, decode: Tensor, step: StepInput) -> Block:
        """Plain decoding is depth 0: no drafter, rows = sequences."""
        if step.rule.depth == 0 or self._speaker is None or not step.decode:
            return build_block(self.lanes, decode, None, None, step.prefills)
        candidates = propose(self._speaker, self.lanes, decode, step.rule.resolve(len(step.decode)))
        caps = torch.tensor(step.depth_caps, dtype=torch.int64)
        keep = keep_best(candidates, step.rule.nodes, caps)
        return build_block(self.lanes, decode, candidates, keep, step.prefills)

    def _probe(self, decode: Tensor) -> Tensor | None:
        if self._speaker is None or decode.numel() == 0:
            return None
        return propose(self._speaker, self.lanes, decode, Rule(1, 1, 2).resolve(decode.numel())).token_ids[:, 1]

    def _sample(
        self, block: Block, logits: Tensor, step: StepInput
    ) -> tuple[Tensor, Tensor, Callable[[int], TokenLogprob] | None]:
        """Target tokens of the sampled rows, [B] bool which sequences failed, and logprobs where asked for."""
        rows = SamplingRows(
            seq=block.sample_lanes, ancestors=block.ancestors, allowed=_allowed(block, logits.shape[1], step)
        )
        wanted = _logprob_rows(block, step)
        unshaped = logits[wanted].clone() if wanted.numel() else None  # sampling may use logits as scratch
        sampled = self._sampler.sample(logits, self.lanes.sampling, rows)
        failed = torch.zeros(block.lanes.numel(), dtype=torch.bool)
        bad = sampled < 0
        if bool(bad.any()):
            bad_lanes = block.sample_lanes[bad].long()
            failed = torch.isin(block.lanes, bad_lanes)
            sampled = sampled.clamp(min=0)
        if unshaped is None or step.logprobs is None:
            return sampled, failed, None
        chosen = self._sampler.logprobs(unshaped, sampled[wanted], max(step.logprobs.values()))
        by_row = {int(block.sample_rows[i]): entry for i, entry in zip(wanted.tolist(), chosen, strict=True)}
        return sampled, failed, by_row.__getitem__


def _allowed(block: Block, vocab_size: int, step: StepInput) -> Tensor | None:
    """Bit masks [n, ceil(V/32)] of the tokens each sampled row may take, None when no lane is constrained."""
    if not step.constraints:
        return None
    masks = np.full((block.sample_rows.numel(), -(-vocab_size // 32)), -1, np.int32)
    lanes, paths = block.sample_lanes.tolist(), block.ancestors.tolist()
    for lane, constraint in step.constraints.items():
        rows = [i for i, row_lane in enumerate(lanes) if row_lane == lane]
        if rows:
            allowed = constraint([[t for t in paths[i] if t >= 0] for i in rows])
            masks[rows] = 0
            masks[rows, : allowed.shape[1]] = allowed[:, : masks.shape[1]]
    return torch.from_numpy(masks)


def _logprob_rows(block: Block, step: StepInput) -> Tensor:
    """Indices into the sampled rows of lanes that want logprobs: [m] int64."""
    if not step.logprobs:
        return torch.empty(0, dtype=torch.int64)
    wanted = torch.tensor(list(step.logprobs), dtype=torch.int32)
    return torch.isin(block.sample_lanes, wanted).nonzero()[:, 0]


def _result(
    block: Block,
    accepted: Accepted,
    sampled: Tensor,
    failed: Tensor,
    logprob_of: Callable[[int], TokenLogprob] | None,
    guesses: Tensor | None,
    times: StepTimes,
) -> StepResult:
    num_seqs, num_decode = block.lanes.numel(), block.num_decode_seqs
    counts = accepted.counts.tolist()
    cu_rows = block.cu_rows.tolist()
    tokens = [row[:count] for row, count in zip(accepted.token_ids.tolist(), counts, strict=True)]
    committed = np.bincount(accepted.rows.seqs.numpy(), minlength=num_seqs).tolist()
    depths = [0] * num_seqs
    if block.max_depth:
        deepest = (block.ancestors[: block.num_decode_rows] >= 0).sum(1).numpy()
        depths[:num_decode] = np.maximum.reduceat(deepest, cu_rows[:num_decode]).tolist()
    drafts = [cu_rows[b + 1] - cu_rows[b] - 1 if b < num_decode else 0 for b in range(num_seqs)]
    hits = None
    if guesses is not None:
        root_tokens = sampled[block.cu_rows[:num_decode].long()]
        hits = (guesses == root_tokens).tolist()
    return StepResult(
        tokens=tokens,
        num_committed=committed,
        matched=accepted.matched.tolist(),
        num_drafts=drafts,
        draft_depth=depths,
        failed=failed.tolist(),
        logprobs=_logprobs(block, accepted, logprob_of, counts),
        probe_hits=hits,
        num_rows=block.num_rows,
        times=times,
    )


def _logprobs(
    block: Block, accepted: Accepted, logprob_of: Callable[[int], TokenLogprob] | None, counts: list[int]
) -> list[list[TokenLogprob]]:
    """Per sequence, one entry per new token where asked for: the row that sampled it is on the accepted path."""
    entries: list[list[TokenLogprob]] = [[] for _ in counts]
    if logprob_of is None:
        return entries
    rows_of: list[list[int]] = [[] for _ in counts]
    for row, seq in zip(accepted.rows.block_rows.tolist(), accepted.rows.seqs.tolist(), strict=True):
        rows_of[seq].append(row)
    for seq, count in enumerate(counts):
        for row in rows_of[seq][len(rows_of[seq]) - count :]:
            try:
                entries[seq].append(logprob_of(row))
            except KeyError:  # this lane did not ask
                break
    return entries
