"""The torch backend: any device and dtype, written to be read. Every other backend is tested against it.

Legend: R query rows, H hidden, F intermediate, Hq/Hk query and K/V heads, D head dim, V vocab, L layers, M keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.interface import DecoderStack, DraftInput, Head, LayerWeights, Linear, Listen, Norm, StackShape


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype norms and softmax are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, rounded to x's dtype before the weight as Hugging Face does. x [..., H], weight [H]."""
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half convention. x [R, heads, D]; cos, sin [R, D//2]."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def visible_keys(batch: ForwardBatch, seq: int) -> Tensor:
    """Which of a sequence's in-flight keys each of its rows sees: [rows, keys] bool."""
    first, last = int(batch.cu_rows[seq]), int(batch.cu_rows[seq + 1])
    num_keys = int(batch.key_lens[seq])
    if batch.mask is not None and batch.causal is not None and not batch.causal[seq]:
        return batch.mask[first:last, :num_keys]
    own = torch.arange(num_keys - (last - first), num_keys, device=batch.input_ids.device)
    return torch.arange(num_keys, device=own.device) <= own[:, None]


def context_slots(batch: ForwardBatch, seq: int) -> Tensor:
    """Slots of the committed entries every row of the sequence sees: [context] int64."""
    positions = torch.arange(batch.context_start, int(batch.context_lens[seq]), device=batch.input_ids.device)
    pages = batch.page_table[seq].long()[positions // batch.page_size]
    return pages * batch.page_size + positions % batch.page_size


def attention(q: Tensor, batch: ForwardBatch, layer: int, pool: KVPool) -> Tensor:
    """q [R, Hq, D] over committed context and allowed in-flight keys -> [R, Hq, D]."""
    out = torch.empty_like(q)
    group = q.shape[1] // pool.k.shape[2]
    for seq in range(batch.num_seqs):
        first, last = int(batch.cu_rows[seq]), int(batch.cu_rows[seq + 1])
        start, count = int(batch.key_starts[seq]), int(batch.key_lens[seq])
        slots = context_slots(batch, seq)
        keys = torch.cat([pool.k[layer, slots], pool.scratch_k[layer, start : start + count]])  # [M, Hk, D]
        values = torch.cat([pool.v[layer, slots], pool.scratch_v[layer, start : start + count]])
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", q[first:last], keys).to(wide(q.dtype)) * q.shape[2] ** -0.5
        seen = visible_keys(batch, seq)
        seen = torch.cat([seen.new_ones(last - first, slots.numel()), seen], 1)  # [rows, M]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
        out[first:last] = torch.einsum("hnm,mhd->nhd", weights, values)
    return out


class TorchStack:
    """Llama layers as plain torch operations (implements interface.DecoderStack)."""

    def __init__(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> None:
        self._shape, self._layers = shape, layers
        self._cos, self._sin = rope

    def forward(
        self,
        residual: Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        *,
        first_input: Tensor | None = None,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        entering: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            entering.append(residual)
            normed = first_input if i == 0 and first_input is not None else self._norm(residual, layer.input_norm)
            q, k, v = self._project(layer, normed, batch.positions)
            pool.scratch_k[i, batch.scratch_slots] = k
            pool.scratch_v[i, batch.scratch_slots] = v
            mixed = attention(q, batch, i, pool).flatten(1)  # [R, Hq*D]
            residual = residual + F.linear(mixed, layer.o)
            gate, up = F.linear(self._norm(residual, layer.post_norm), layer.gate_up).chunk(2, -1)
            residual = residual + F.linear(F.silu(gate) * up, layer.down)
        entering.append(residual)
        return residual, torch.cat([entering[i] for i in capture], -1) if capture else None

    def write_kv(self, first_input: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Layer 0's K/V of rows [n, input_size], already normed, straight into pages."""
        _, k, v = self._project(self._layers[0], first_input, positions)
        pool.k[0, slots] = k
        pool.v[0, slots] = v

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None, "a layer without input norm needs first_input"
        return rms_norm(x, weight, self._shape.rms_norm_eps)

    def _project(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [R, Hq, D], rotated k and v [R, Hk, D]."""
        s = self._shape
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, s.head_dim)
        q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, s.rms_norm_eps), rms_norm(k, layer.k_norm, s.rms_norm_eps)
        cos, sin = self._cos[positions], self._sin[positions]
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class TorchListen:
    """Implements interface.Listen."""

    def __init__(self, fuse: Linear, first_input: DraftInput, stack: TorchStack) -> None:
        self._fuse, self._first_input, self._stack = fuse, first_input, stack

    def __call__(self, aux: Tensor, rows: CommittedRows, carried: CarriedFeatures, pool: KVPool) -> None:
        fused = self._fuse(aux[rows.block_rows])  # [n, H]
        first = rows.before < 0
        before = torch.where(first[:, None], carried.lanes[rows.lanes], fused[rows.before])
        newest, full = first.roll(-1), rows.positions % carried.page_size == carried.page_size - 1
        carried.lanes[rows.lanes[newest]] = fused[newest]
        carried.pages[rows.slots[full] // carried.page_size] = fused[full]
        first_input = self._first_input(rows.token_ids, before)
        self._stack.write_kv(first_input, (rows.positions - 1).clamp(min=0), rows.slots, pool)


class TorchKernels:
    """Implements interface.KernelFactory."""

    name = "torch"

    def stack(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> DecoderStack:
        return TorchStack(shape, layers, rope)

    def linear(self, weight: Tensor) -> Linear:
        return lambda x: F.linear(x, weight)

    def head(self, norm: Tensor, eps: float, weight: Tensor) -> Head:
        return lambda hidden: F.linear(rms_norm(hidden, norm, eps), weight).to(wide(weight.dtype))

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return lambda x: rms_norm(x, weight, eps)

    def draft_input(self, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float) -> DraftInput:
        def join(token_ids: Tensor, hidden: Tensor) -> Tensor:
            embedded = F.embedding(token_ids, embedding)
            return torch.cat([rms_norm(embedded, embedding_norm, eps), rms_norm(hidden, hidden_norm, eps)], -1)

        return join

    def listen(self, fuse: Linear, first_input: DraftInput, stack: DecoderStack) -> Listen:
        assert isinstance(stack, TorchStack)
        return TorchListen(fuse, first_input, stack)
