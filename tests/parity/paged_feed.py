"""PagedFeed: runs a model over several sequences through scattered pages, as the engine does, but by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.batch import CarriedFeatures, CommittedRows, ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.models.interface import Drafter, ModelInfo

PAGE_SIZE, NUM_PAGES = 4, 64


class PagedFeed:
    """Pages and lengths of `num_seqs` sequences; pages are dealt in a shuffled order."""

    def __init__(self, info: ModelInfo, num_seqs: int = 1, *, first_slot: int = 0) -> None:
        order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(7))
        self.page_table = order.view(num_seqs, -1).to(torch.int32)
        self.first_slot = first_slot
        self.lens = [first_slot] * num_seqs
        self.pool = KVPool.allocate(
            num_layers=info.num_layers,
            num_slots=NUM_PAGES * PAGE_SIZE,
            num_scratch_rows=256,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            dtype=info.dtype,
            device=torch.device("cpu"),
        )

    def batch(self, token_ids: list[list[int]], logit_rows: list[int] | None = None) -> ForwardBatch:
        """Causal rows: token_ids[b] continues sequence b. RoPE positions start at 0 in the first slot."""
        counts = torch.tensor([len(ids) for ids in token_ids])
        ends = counts.cumsum(0)
        context = torch.tensor(self.lens)
        return ForwardBatch(
            input_ids=torch.tensor([token for ids in token_ids for token in ids]),
            positions=torch.cat(
                [torch.arange(n) + start - self.first_slot for n, start in zip(counts, context, strict=True)]
            ),
            cu_rows=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
            key_starts=(ends - counts).to(torch.int32),
            key_lens=counts.to(torch.int32),
            scratch_slots=torch.arange(int(ends[-1])),
            context_lens=context.to(torch.int32),
            page_table=self.page_table,
            page_size=PAGE_SIZE,
            context_start=self.first_slot,
            logit_rows=None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
        )

    def slots(self, seq: int, start: int, count: int) -> Tensor:
        at = torch.arange(start, start + count)
        return self.page_table[seq].long()[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE

    def hear(self, drafter: Drafter, aux: Tensor, token_ids: list[int]) -> Tensor:
        """Listens to all tokens of sequence 0 at once, token j to slot j; the last one's feature [H]."""
        count = len(token_ids)
        hidden = drafter.info.hidden_size
        features = [torch.zeros(rows, hidden, dtype=aux.dtype) for rows in (1, NUM_PAGES)]
        none = torch.zeros(count, dtype=torch.int64)
        rows = CommittedRows(
            block_rows=torch.arange(count),
            token_ids=torch.tensor(token_ids),
            slots=self.slots(0, 0, count),
            positions=torch.arange(count),
            seqs=none,
            lanes=none,
            before=torch.arange(count) - 1,
        )
        drafter.listen(aux, rows, CarriedFeatures(features[0], features[1], PAGE_SIZE), self.pool)
        return features[0][0]

    def commit(self, token_ids: list[list[int]]) -> None:
        """Moves the rows of the last batch to their pages."""
        row = 0
        for seq, ids in enumerate(token_ids):
            self.pool.commit(torch.arange(row, row + len(ids)), self.slots(seq, self.lens[seq], len(ids)))
            self.lens[seq] += len(ids)
            row += len(ids)
