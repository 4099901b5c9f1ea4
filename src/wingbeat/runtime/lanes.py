"""Lanes: the device-resident state of running sequences, one fixed row per sequence.

Everything a step needs between two steps is here or in pages: tokens, lengths, page tables, sampling settings and one
feature [H] per lane. No shape depends on what a step decides to do. The host writes a lane when it hands it to a
sequence and otherwise only its page table; lengths, tokens and features are advanced by the step itself.

Legend: S lanes, T history capacity, P pages per sequence, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.kernels.noise import noise_key
from wingbeat.kernels.sampling import SamplingBatch
from wingbeat.types import SamplingParams

MAX_STOP_IDS = 72
MAX_BIAS_IDS = 300


@dataclass(frozen=True, slots=True)
class Lanes:
    """Tensors indexed by lane. context_lens counts tokens whose K/V is in pages; history_lens counts known tokens."""

    sampling: SamplingBatch  # tensors [S, ...]; history [S, T], history_lens [S] live there
    context_lens: Tensor  # [S] int32
    page_table: Tensor  # [S, P] int32
    feature: Tensor  # [S, H] model dtype: of the newest row in pages
    end_ids: Tensor  # [S, E] int32, -1 padded: tokens that end the sequence
    max_lens: Tensor  # [S] int32: the sequence ends when its history reaches this length
    finished: Tensor  # [S] bool: ended on the device, maybe not yet known to the host

    @staticmethod
    def allocate(
        *, num_lanes: int, max_len: int, page_size: int, feature_size: int, dtype: torch.dtype, device: torch.device
    ) -> Lanes:
        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        def floats(fill: float) -> Tensor:
            return torch.full((num_lanes,), fill, dtype=torch.float32, device=device)

        sampling = SamplingBatch(
            temperature=floats(0.0),
            top_k=ints(num_lanes),
            top_p=floats(1.0),
            min_p=floats(0.0),
            presence_penalty=floats(0.0),
            frequency_penalty=floats(0.0),
            repetition_penalty=floats(1.0),
            noise_key=torch.zeros(num_lanes, dtype=torch.int64, device=device),
            history=ints(num_lanes, max_len),
            history_lens=ints(num_lanes),
            prompt_lens=ints(num_lanes),
            min_tokens=ints(num_lanes),
            stop_ids=ints(num_lanes, MAX_STOP_IDS, fill=-1),
            bias_ids=ints(num_lanes, MAX_BIAS_IDS, fill=-1),
            bias_values=torch.zeros(num_lanes, MAX_BIAS_IDS, device=device),
        )
        return Lanes(
            sampling=sampling,
            context_lens=ints(num_lanes),
            page_table=ints(num_lanes, -(-max_len // page_size)),
            feature=torch.zeros(num_lanes, feature_size, dtype=dtype, device=device),
            end_ids=ints(num_lanes, MAX_STOP_IDS, fill=-1),
            max_lens=ints(num_lanes),
            finished=torch.zeros(num_lanes, dtype=torch.bool, device=device),
        )

    def open(
        self,
        lane: int,
        *,
        tokens: list[int],
        prompt_len: int,
        max_len: int,
        params: SamplingParams,
        seed: int,
        choice_index: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        """Hands `lane` to a sequence with these known tokens (after a preemption: outputs included)."""
        s = self.sampling
        s.history[lane, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        s.history_lens[lane], s.prompt_lens[lane] = len(tokens), prompt_len
        s.temperature[lane], s.top_p[lane], s.min_p[lane] = params.temperature, params.top_p, params.min_p
        s.top_k[lane] = max(params.top_k, 0)
        s.presence_penalty[lane], s.frequency_penalty[lane] = params.presence_penalty, params.frequency_penalty
        s.repetition_penalty[lane] = params.repetition_penalty
        s.noise_key[lane] = noise_key(seed, choice_index)
        s.min_tokens[lane] = params.min_tokens
        _fill(s.stop_ids[lane], [*eos_ids, *params.stop_token_ids])
        _fill(self.end_ids[lane], [*(() if params.ignore_eos else eos_ids), *params.stop_token_ids])
        _fill(s.bias_ids[lane], list(params.logit_bias))
        s.bias_values[lane, : len(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
        self.context_lens[lane], self.max_lens[lane] = 0, max_len
        self.feature[lane] = 0
        self.finished[lane] = False

    def set_pages(self, lane: int, first: int, pages: list[int]) -> None:
        """Writes page ids `first`, `first`+1, ... of the lane's table."""
        self.page_table[lane, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def resume_at(self, lane: int, context_len: int, feature: Tensor) -> None:
        """The first `context_len` tokens are in pages already (prefix hit); `feature` [H] is of the last of them."""
        self.context_lens[lane] = context_len
        self.feature[lane] = feature


def _fill(row: Tensor, ids: list[int]) -> None:
    row.fill_(-1)
    row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
