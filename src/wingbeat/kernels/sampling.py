"""Records the sampling kernels work on. One SamplingBatch describes all sequences of a step.

Legend: B sequences, n rows to sample, V vocab, T history capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
