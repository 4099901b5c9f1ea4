"""What sampling works on and what it promises: the records of a step and the Sampler both backends implement.

Legend: B sequences, n rows to sample, V vocab, T history capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wingbeat.errors import unknown_name
from wingbeat.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Per-sequence sampling state, on the model's device."""

    temperature: Tensor  # [B] float32; 0 = greedy
    top_k: Tensor  # [B] int32; 0 = all
    top_p: Tensor  # [B] float32; 1 = all
    min_p: Tensor  # [B] float32; 0 = all
    presence_penalty: Tensor  # [B] float32
    frequency_penalty: Tensor  # [B] float32
    repetition_penalty: Tensor  # [B] float32; 1 = none
    noise_key: Tensor  # [B] int64: noise_key(seed, choice index)
    history: Tensor  # [B, T] int32: prompt and output tokens, the root included
    history_lens: Tensor  # [B] int32
    prompt_lens: Tensor  # [B] int32
    min_tokens: Tensor  # [B] int32
    stop_ids: Tensor  # [B, E] int32, -1 padded: ids barred until min_tokens outputs exist (EOS and stop tokens)
    bias_ids: Tensor  # [B, K] int32, -1 padded
    bias_values: Tensor  # [B, K] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The rows to sample. The token sampled at a row of sequence s with k in-flight ancestors (itself included, root
    excluded) stands at sequence position history_lens[s] + k; that position keys its noise."""

    seq: Tensor  # [n] int32 index into the SamplingBatch
    ancestors: Tensor  # [n, A] int32 in-flight token ids from the root's child down to this row, -1 padded at the end
    allowed: Tensor | None = None  # [n, ceil(V/32)] int32 bit mask (grammar); None = all


class Sampler(Protocol):
    """Drafter-invariant sampling: always argmax(log p + g), g keyed by (seed, choice, position, target token id)."""

    def sample(self, logits: Tensor, batch: SamplingBatch, rows: SamplingRows) -> Tensor:
        """The target's token at each row: [n] int64; -1 where logits are not finite or nothing is allowed.

        logits [n, V] float32 (or float64) may be used as scratch. A function of the row's own prefix: history and its
        in-flight ancestors. Order: repetition, frequency and presence penalties, bias, min_tokens, grammar; then
        temperature, min_p, top_k, top_p of what is left; temperature 0 takes the largest, the lower id on ties.
        """
        ...

    def propose_topk(
        self, logits: Tensor, target_ids: Tensor, batch: SamplingBatch, seq: Tensor, positions: Tensor, topk: int
    ) -> tuple[Tensor, Tensor]:
        """The drafter's best guesses, best first: target ids [R, topk] int64 and the estimated acceptance of each
        [R, topk] float32 in [0, 1].

        logits [R, D] float32, target_ids [D] int64, seq [R] int64, positions [R] int64 of the drafted tokens. Greedy
        sequences guess by logits, and the estimate is the draft probability. Sampled ones are scored with the noise
        the target will use there; under shared noise a guess's own probability hardly predicts agreement (DESIGN
        section 3), so the estimate comes from its margin, its score minus the next best one's: the best guess takes
        1 - exp(-margin)/2, and each further one the same share of what is left.
        """
        ...

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprob]:
        """Log-probabilities of `token_ids` [m] under unshaped logits [m, V], with the `num_top` likeliest tokens."""
        ...


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprob]:
    """See Sampler.logprobs; few rows ask, so both backends use this."""
    table = torch.log_softmax(logits.to(torch.float32), -1)
    chosen = table.gather(1, token_ids[:, None])[:, 0].tolist()
    values, ids = table.topk(min(num_top, table.shape[1]), dim=1)
    tops = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token_id=token, logprob=value, top=top)
        for token, value, top in zip(token_ids.tolist(), chosen, tops, strict=True)
    ]


def sampler_for(device_type: str, dtype: torch.dtype, backend: str | None = None) -> Sampler:
    """The sampler for logits of a `dtype` model: Numba on a CPU (float32 logits), else torch."""
    name = backend or ("cpu" if device_type == "cpu" and dtype != torch.float64 else "torch")
    if name == "torch":
        from wingbeat.kernels.sample_torch import TorchSampler

        return TorchSampler()
    if name == "cpu":
        from wingbeat.kernels.sample_cpu import CpuSampler

        return CpuSampler()
    raise unknown_name("kernels", name, ("torch", "cpu"))
