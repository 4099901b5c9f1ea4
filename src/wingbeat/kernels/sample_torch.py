"""Sampling in plain torch: any device, sorted and simple. The reference of sample_cpu.

Scores are float32, as in sample_cpu and by the same operations in the same order; noise and sums of probabilities are
float64. The two can differ only where a sum meets top_p within float32 rounding.

Legend: n rows to sample, V vocab, R rows that propose, D draft vocab.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wingbeat.kernels.noise import gumbel
from wingbeat.kernels.sampling import SamplingBatch, SamplingRows, token_logprobs
from wingbeat.types import TokenLogprob


def shape_row(logits: Tensor, batch: SamplingBatch, seq: int, ancestors: list[int], allowed: Tensor | None) -> Tensor:
    """[V]: the row's logits after penalties, bias, min_tokens and grammar (before temperature), in their dtype.

    Ids outside the vocabulary (clients name bias and stop ids) have no effect.
    """
    z = logits.clone()
    history = batch.history[seq, : int(batch.history_lens[seq])].tolist() + ancestors
    outputs = history[int(batch.prompt_lens[seq]) :]
    repetition, frequency = batch.repetition_penalty[seq], batch.frequency_penalty[seq]
    if float(repetition) != 1.0:
        seen = torch.tensor(sorted(set(history)), device=z.device)
        z[seen] = torch.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
    for token in set(outputs):
        z[token] -= frequency * outputs.count(token) + batch.presence_penalty[seq]
    for token, bias in zip(batch.bias_ids[seq].tolist(), batch.bias_values[seq].tolist(), strict=True):
        if 0 <= token < z.numel():
            z[token] += bias
    if len(outputs) < int(batch.min_tokens[seq]):
        z[[token for token in batch.stop_ids[seq].tolist() if 0 <= token < z.numel()]] = float("-inf")
    if allowed is not None:
        bits = (allowed.repeat_interleave(32)[: z.numel()] >> (torch.arange(z.numel(), device=z.device) % 32)) & 1
        z[bits == 0] = float("-inf")
    return z


def keep_mask(s: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[V] bool: tokens that survive min_p, then top_k, then top_p of what is left; lower ids first on ties.

    s [V]: logits over temperature, the largest at 0.
    """
    keep = s > float("-inf")
    if min_p > 0:
        keep &= s >= math.log(min_p)
    order = torch.where(keep, s, float("-inf")).sort(descending=True, stable=True).indices[: int(keep.sum())]
    if top_k:
        order = order[:top_k]
    if top_p < 1.0:
        mass = s[order].double().exp().cumsum(0)
        order = order[: int((mass < top_p * mass[-1]).sum()) + 1]
    chosen = torch.zeros_like(keep)
    chosen[order] = True
    return chosen


def estimate_sampled(margin: Tensor) -> Tensor:
    """Estimated acceptance of each guess under shared noise, best first (see Sampler.propose_topk): [R, K]."""
    share = 1.0 - 0.5 * torch.exp(-margin)
    left = torch.cumprod(1.0 - share, -1).roll(1, -1)
    left[:, 0] = 1.0
    return share * left


class TorchSampler:
    """Implements sampling.Sampler."""

    def sample(self, logits: Tensor, batch: SamplingBatch, rows: SamplingRows) -> Tensor:
        chosen = [self._sample_row(logits[i], batch, rows, i) for i in range(logits.shape[0])]
        return torch.tensor(chosen, dtype=torch.int64, device=logits.device)

    def _sample_row(self, logits: Tensor, batch: SamplingBatch, rows: SamplingRows, i: int) -> int:
        seq = int(rows.seq[i])
        ancestors = [token for token in rows.ancestors[i].tolist() if token >= 0]
        if bool(logits.isnan().any()):
            return -1
        z = shape_row(logits, batch, seq, ancestors, None if rows.allowed is None else rows.allowed[i])
        best = z.max()
        if not bool(best.isfinite()):
            return -1
        temperature = batch.temperature[seq]
        if float(temperature) == 0:
            return int((z == best).nonzero()[0, 0])
        s = (z - best) * temperature.reciprocal()
        s[~keep_mask(s, int(batch.top_k[seq]), float(batch.top_p[seq]), float(batch.min_p[seq]))] = float("-inf")
        position = batch.history_lens[seq].long() + len(ancestors)
        return int((s + gumbel(batch.noise_key[seq], position, torch.arange(s.numel(), device=s.device))).argmax())

    def propose_topk(
        self, logits: Tensor, target_ids: Tensor, batch: SamplingBatch, seq: Tensor, positions: Tensor, topk: int
    ) -> tuple[Tensor, Tensor]:
        temperature = batch.temperature[seq].double()[:, None]
        z = logits.double() / torch.where(temperature > 0, temperature, 1.0)
        noise = gumbel(batch.noise_key[seq][:, None], positions[:, None], target_ids[None])
        scores = torch.where(temperature > 0, z + noise, z)
        values, order = scores.sort(dim=1, descending=True, stable=True)
        best = order[:, :topk]
        prob = z.softmax(1).gather(1, best).float()
        margin = (values[:, :topk] - values[:, 1 : topk + 1]).float()
        return target_ids[best], torch.where(temperature > 0, estimate_sampled(margin), prob)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprob]:
        return token_logprobs(logits, token_ids, num_top)
