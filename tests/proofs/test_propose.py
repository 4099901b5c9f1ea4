"""propose against a drafter that reads every path at once; keep_best on scores with ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import engine, models
from torch import Tensor

from wingbeat.batch import ForwardBatch
from wingbeat.cache.pool import KVPool
from wingbeat.engine.engine import Engine
from wingbeat.models.interface import Drafter, ModelInfo
from wingbeat.spec.block import Candidates
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.spec.propose import Speaker, keep_best, propose
from wingbeat.types import Request, SamplingParams

PROMPTS = [(9, 40, 77, 3), tuple(range(20, 57)), (200, 11)]


def whole_sequence(info: ModelInfo, tokens: Tensor) -> tuple[ForwardBatch, KVPool]:
    """All tokens as causal rows from position 0, with nothing in pages."""
    num = tokens.numel()
    pool = KVPool.allocate(
        num_layers=info.num_layers,
        num_slots=1,
        num_scratch_rows=num,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        device=torch.device("cpu"),
    )
    ends = torch.tensor([0, num], dtype=torch.int32)
    batch = ForwardBatch(
        input_ids=tokens,
        positions=torch.arange(num),
        cu_rows=ends,
        key_starts=ends[:1],
        key_lens=ends[1:],
        scratch_slots=torch.arange(num),
        context_lens=torch.zeros(1, dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        page_size=1,
    )
    return batch, pool


def speak_along(drafter: Drafter, features: Tensor, tokens: list[int], path: list[int]) -> list[Tensor]:
    """Draft probabilities [D] after the root and after each token of `path`, every row computed anew (EAGLE-3).

    features [n-1, H]: fused, of the rows before tokens[1:]; tokens ends with the root.
    """
    hidden, known, found = features, torch.tensor(tokens[1:]), []
    for token in [*path, 0]:
        batch, pool = whole_sequence(drafter.info, known)
        logits, out = drafter.forward(hidden, batch, pool)
        found.append(logits[-1].softmax(-1))
        hidden, known = torch.cat([hidden, out[-1:]]), torch.cat([known, torch.tensor([token])])
    return found


def histories(built: Engine, steps: int) -> list[list[int]]:
    """Runs the prompts greedily for some plain steps; the known tokens of lanes 0, 1, ..."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        built.add(Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params))
    for _ in range(steps):
        built.step()
    state = built._core.stepper.lanes.sampling
    return [state.history[lane, : int(state.history_lens[lane])].tolist() for lane in range(len(PROMPTS))]


@pytest.mark.parametrize("rule", [chain(3), tree(3, 2, 8)], ids=str)
def test_every_candidate_is_scored_as_if_its_path_were_the_whole_sequence(rule: Rule) -> None:
    target, drafter = models()
    ids = drafter.target_ids.tolist()
    with engine(OFF, page_size=4) as built:
        known = histories(built, steps=9)
        speaker = built._core.stepper._speaker
        assert isinstance(speaker, Speaker)
        found = propose(speaker, built._core.stepper.lanes, torch.arange(3), rule.resolve(3))
    for b, tokens in enumerate(known):
        batch, pool = whole_sequence(target.info, torch.tensor(tokens[:-1]))
        aux = target.forward(batch, pool, capture=drafter.aux_layer_ids).aux
        assert aux is not None
        features = drafter.fuse(aux)
        assert found.token_ids[b, 0] == tokens[-1]
        for c in range(1, found.token_ids.shape[1]):
            path = path_to(found, b, c)
            chances = speak_along(drafter, features, tokens, path)
            score = 1.0
            for chance, token in zip(chances, path, strict=False):
                assert token in [ids[i] for i in chance.topk(rule.topk).indices]
                score *= float(chance[ids.index(token)])
            assert float(found.scores[b, c]) == pytest.approx(score, rel=1e-4)
            assert int(found.depths[b, c]) == len(path)


def path_to(candidates: Candidates, seq: int, node: int) -> list[int]:
    """Tokens from the root's child down to a candidate."""
    path: list[int] = []
    while node:
        path.insert(0, int(candidates.token_ids[seq, node]))
        node = int(candidates.parents[seq, node])
    return path


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.integers(1, 14), st.sampled_from([1.0, 0.5]))
def test_kept_nodes_are_closed_under_ancestors_whatever_the_ties(
    seed: int, num_seqs: int, depth: int, nodes: int, step: float
) -> None:
    """Shares are 1 or `step`, so scores tie across siblings and across depths."""
    generator = torch.Generator().manual_seed(seed)
    width, topk = 1 + 3 * depth, 3
    depths = torch.tensor([0] + [d for d in range(1, depth + 1) for _ in range(topk)]).expand(num_seqs, -1)
    parents, scores = torch.zeros(num_seqs, width, dtype=torch.int64), torch.ones(num_seqs, width)
    for c in range(1, width):
        level = range(max(1 + topk * (int(depths[0, c]) - 2), 0), max(1 + topk * (int(depths[0, c]) - 1), 1))
        for b in range(num_seqs):
            parents[b, c] = level[int(torch.randint(len(level), (1,), generator=generator))]
            share = 1.0 if torch.rand(1, generator=generator) < 0.5 else step
            scores[b, c] = scores[b, parents[b, c]] * share
    caps = torch.randint(0, depth + 1, (num_seqs,), generator=generator)
    every = Candidates(torch.zeros_like(parents), parents, depths, scores)
    free, capped = keep_best(every, nodes), keep_best(every, nodes, caps)
    assert free.sum(1).tolist() == [min(nodes, width)] * num_seqs
    assert torch.equal(capped, free & (depths <= caps[:, None]))
    for keep in (free, capped):
        assert bool(keep[:, 0].all())
        assert bool(keep.gather(1, parents)[keep].all()), "a kept node without its parent"
    for b in range(num_seqs):
        if not bool(free[b].all()):
            assert scores[b][free[b]].min() >= scores[b][~free[b]].max()
