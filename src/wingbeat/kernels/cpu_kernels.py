"""The cpu backend: bf16 weights packed once and compiled calls on them (Numba); the stack is in cpu_stack.

Legend: R rows, H hidden, V vocab.
"""

# mypy: ignore-errors
from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows
from wingbeat.cache.pool import KVPool
from wingbeat.kernels.cpu_claims import new_phases
from wingbeat.kernels.cpu_listen import join_norms, listen_rows
from wingbeat.kernels.cpu_math import BLOCK, pack
from wingbeat.kernels.cpu_products import linear, norm_bits, product
from wingbeat.kernels.cpu_stack import CpuStack, bits, floats, padded, row_columns
from wingbeat.kernels.interface import DecoderStack, DraftInput, Head, LayerWeights, Linear, Listen, Norm, StackShape
from wingbeat.kernels.torch_kernels import TorchListen, TorchStack


class CpuLinear:
    """Implements interface.Linear."""

    def __init__(self, weight: Tensor, num_workers: int) -> None:
        self.packed, self._workers = pack(weight), num_workers
        self._outputs, self._inputs = weight.shape
        self._make_room(16)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows > self._num_rows:
            self._make_room(2 * num_rows)
        self._x[:num_rows, : self._inputs] = bits(x)
        out = torch.empty(num_rows, self._outputs, dtype=torch.bfloat16)
        linear(new_phases(), self._workers, self.packed, self._x, self._y, num_rows, bits(out))
        return out

    def _make_room(self, num_rows: int) -> None:
        blocks, pairs = self.packed.shape[:2]
        self._num_rows = num_rows
        self._x = np.zeros((padded(num_rows), row_columns(2 * pairs, 2)), np.uint16)
        self._y = np.zeros((padded(num_rows), row_columns(blocks * BLOCK, 4)), np.float32)


class CpuDraftInput:
    """Implements interface.DraftInput."""

    def __init__(self, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float) -> None:
        self.embedding = bits(embedding)
        self.norms = floats(embedding_norm), floats(hidden_norm), np.float32(eps)

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        out = torch.empty(hidden.shape[0], 2 * hidden.shape[1], dtype=torch.bfloat16)
        first, second, eps = self.norms
        join_norms(token_ids.numpy(), self.embedding, first, bits(hidden), second, eps, bits(out))
        return out


class CpuNorm:
    """Implements interface.Norm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = floats(weight), np.float32(eps)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        norm_bits(bits(x), self._weight, self._eps, bits(out), x.shape[0])
        return out


class CpuHead:
    """Implements interface.Head."""

    def __init__(self, norm: Tensor, eps: float, weight: Tensor, num_workers: int) -> None:
        self._packed, self._norm, self._eps = pack(weight), floats(norm), np.float32(eps)
        self._vocab, self._workers = weight.shape[0], num_workers

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = hidden.shape[0]
        normed = np.zeros((padded(num_rows), row_columns(2 * self._packed.shape[1], 2)), np.uint16)
        norm_bits(bits(hidden.contiguous()), self._norm, self._eps, normed, num_rows)
        logits = torch.empty(padded(num_rows), self._packed.shape[0] * BLOCK)
        product(new_phases(), self._workers, self._packed, normed, logits.numpy(), num_rows)
        logits = logits[:num_rows, : self._vocab]
        return logits if logits.is_contiguous() else logits.contiguous()


class CpuListen:
    """Implements interface.Listen."""

    def __init__(self, fuse: CpuLinear, first_input: CpuDraftInput, stack: CpuStack, num_workers: int) -> None:
        self._fuse, self._input, self._kv = fuse.packed, first_input, stack.kv
        self._workers = num_workers
        self._make_room(16)

    def __call__(self, aux: Tensor, rows: CommittedRows, carried: CarriedFeatures, pool: KVPool) -> None:
        if rows.slots.numel() > self._num_rows:
            self._make_room(2 * rows.slots.numel())
        listen_rows(
            self._workers, new_phases(2), bits(aux), rows.block_rows.numpy(), rows.token_ids.numpy(),
            (rows.slots.numpy(), rows.positions.numpy(), rows.lanes.numpy(), rows.before.numpy()), self._fuse,
            self._input.embedding, self._input.norms, self._kv, self._work, (bits(carried.lanes), bits(carried.pages)),
            carried.page_size, (bits(pool.k)[0], bits(pool.v)[0]),
        )  # fmt: skip

    def _make_room(self, num_rows: int) -> None:
        rows, hidden = padded(num_rows), self._input.embedding.shape[1]
        fuse_blocks, fuse_pairs = self._fuse.shape[:2]
        kv_blocks = self._kv[0].shape[0]
        self._num_rows = num_rows
        self._work = (
            np.zeros((rows, row_columns(2 * fuse_pairs, 2)), np.uint16),
            np.zeros((rows, row_columns(fuse_blocks * BLOCK, 4)), np.float32),
            np.zeros((rows, hidden), np.uint16),  # fused
            np.zeros((rows, hidden), np.uint16),  # of the row before
            np.zeros((rows, row_columns(2 * hidden, 2)), np.uint16),
            np.zeros((rows, row_columns(kv_blocks * BLOCK, 4)), np.float32),
        )


class CpuKernels:
    """Implements interface.KernelFactory; shapes it cannot pack go to the torch backend."""

    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        self._workers = min(num_threads, numba.config.NUMBA_NUM_THREADS)

    def stack(self, shape: StackShape, layers: list[LayerWeights], rope: tuple[Tensor, Tensor]) -> DecoderStack:
        if shape.hidden_size % BLOCK or shape.intermediate_size % BLOCK or shape.head_dim % 32:
            return TorchStack(shape, layers, rope)
        return CpuStack(shape, layers, rope, self._workers)

    def linear(self, weight: Tensor) -> Linear:
        return CpuLinear(weight, self._workers)

    def head(self, norm: Tensor, eps: float, weight: Tensor) -> Head:
        return CpuHead(norm, eps, weight, self._workers)

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return CpuNorm(weight, eps)

    def draft_input(self, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float) -> DraftInput:
        return CpuDraftInput(embedding, embedding_norm, hidden_norm, eps)

    def listen(self, fuse: Linear, first_input: DraftInput, stack: DecoderStack) -> Listen:
        if isinstance(stack, TorchStack):
            return TorchListen(fuse, first_input, stack)
        assert isinstance(fuse, CpuLinear) and isinstance(first_input, CpuDraftInput) and isinstance(stack, CpuStack)
        return CpuListen(fuse, first_input, stack, self._workers)
