"""Eagle3Drafter: fuse the target's aux features, listen to committed tokens, speak when asked (EAGLE-3, sec. 3).

    g = fc(aux)                                   the fused feature of a row
    x = [input_norm(embed(token)); hidden_norm(g)]
    y = g + attention(x);  y = y + mlp(post_norm(y))
    draft logits = head(norm(y));  the next level's g is y (EAGLE-3.1's norm_output: norm(y))

Legend: N tokens, R query rows, H hidden, D draft vocab, A aux features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.interface import KernelFactory, LayerWeights
from wingbeat.models.decoder import head_or_empty
from wingbeat.models.eagle3_config import DraftConfig
from wingbeat.models.interface import ModelInfo
from wingbeat.models.rope import rope_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """A drafter's tensors, checkpoint layout, final dtype and device."""

    embedding: Tensor  # [V, H], the target's own unless the checkpoint brings one
    fc: Tensor  # [H, A * H_target]
    aux_norms: tuple[Tensor, ...]  # A of [H_target] (fc_norm), one of [A * H_target] (norm_before_fc), or none
    layer: LayerWeights  # input_norm None: the two halves of the input have their own
    input_norm: Tensor  # [H], of the embedding half
    hidden_norm: Tensor  # [H], of the feature half
    norm: Tensor  # [H]
    head: Tensor  # [D, H]
    target_ids: Tensor  # [D] int64


class Eagle3Drafter:
    """A one-layer EAGLE-3 drafter (implements interface.Drafter)."""

    def __init__(
        self,
        info: ModelInfo,
        config: DraftConfig,
        weights: DraftWeights,
        kernels: KernelFactory,
        *,
        aux_layer_ids: tuple[int, ...],
        num_positions: int,
    ) -> None:
        self.info = info
        self.aux_layer_ids = aux_layer_ids
        self.draft_vocab_size = weights.head.shape[0]
        self.target_ids = weights.target_ids  # [D] int64
        eps = config.layer.rms_norm_eps
        self._aux_norms = [kernels.norm(weight, eps) for weight in weights.aux_norms]
        self._input = kernels.draft_input(weights.embedding, weights.input_norm, weights.hidden_norm, eps)
        self._norm = kernels.norm(weights.norm, eps)
        self._norm_before_residual, self._norm_output = config.norm_before_residual, config.norm_output
        rope = rope_tables(config.layer.rope, config.layer.head_dim, num_positions, weights.fc.device)
        shape = config.layer.stack_shape(input_size=2 * config.layer.hidden_size)
        self._stack = kernels.stack(shape, [weights.layer], rope)
        self._fc = kernels.linear(weights.fc)
        self._listen = kernels.listen(self._fc, self._input, self._stack)
        self._head = kernels.head(weights.norm, eps, weights.head)

    def fuse(self, aux: Tensor) -> Tensor:
        """[N, A * H_target] -> [N, H]."""
        return self._fc(self._normed(aux))

    def listen(self, aux: Tensor, rows: CommittedRows, carried: CarriedFeatures, pool: KVPool) -> None:
        """Writes the K/V entries of committed rows and carries their features on. aux [R, A * H_target]."""
        if rows.slots.numel():  # kernels never see 0 rows
            self._listen(self._normed(aux), rows, carried, pool)

    def _normed(self, aux: Tensor) -> Tensor:
        if not self._aux_norms:
            return aux
        parts = aux.chunk(len(self._aux_norms), dim=-1)
        return torch.cat([norm(part.contiguous()) for part, norm in zip(parts, self._aux_norms, strict=True)], dim=-1)

    def forward(self, hidden: Tensor, batch: ForwardBatch, pool: KVPool) -> tuple[Tensor, Tensor]:
        """Draft logits [n, D] of batch.logit_rows (all R rows when None) and the next level's hidden state [R, H]."""
        first_input = self._input(batch.input_ids, hidden)  # [R, 2H], its second half the normed hidden state
        residual = first_input[:, hidden.shape[1] :] if self._norm_before_residual else hidden
        output, _ = self._stack.forward(residual, batch, pool, first_input=first_input)  # [R, H]
        wanted = output if batch.logit_rows is None else output[batch.logit_rows]
        logits = head_or_empty(self._head, wanted, self.draft_vocab_size)
        return logits, self._norm(output) if self._norm_output else output
