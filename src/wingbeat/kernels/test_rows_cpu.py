"""pack_rows and accept_rows against short Python references, on random ancestor-closed trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.kernels.rows_cpu import accept_rows, pack_rows


def random_tree(rng: np.random.Generator, num_candidates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    parents = np.array([0] + [rng.integers(0, c) for c in range(1, num_candidates)])
    depths, keep = np.zeros(num_candidates, np.int64), np.ones(num_candidates, np.bool_)
    for c in range(1, num_candidates):
        depths[c] = depths[parents[c]] + 1
        keep[c] = keep[parents[c]] and rng.random() < 0.7
    return rng.integers(0, 6, num_candidates), parents, depths, keep


def ancestors(parents: np.ndarray, node: int) -> list[int]:
    chain = [node]
    while node != 0:
        node = parents[node]
        chain.append(node)
    return chain[::-1]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 12))
def test_pack_rows_keeps_ancestors_and_paths(seed: int, num_seqs: int, num_candidates: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, num_candidates) for _ in range(num_seqs)]
    tokens, parents, depths, keep = (np.stack([t[i] for t in trees]) for i in range(4))
    max_depth = int(depths.max())
    out_tokens, out_parents, out_depths, cu, mask, paths, chains = pack_rows(tokens, parents, depths, keep, max_depth)
    assert cu[-1] == keep.sum() == len(out_tokens)
    row = 0
    for b in range(num_seqs):
        kept = np.flatnonzero(keep[b])
        assert cu[b + 1] - cu[b] == len(kept)
        for c in kept:
            line = ancestors(parents[b], c)
            local = [int(np.searchsorted(kept, a)) for a in line]
            assert sorted(np.flatnonzero(mask[row])) == local
            assert [t for t in paths[row] if t >= 0] == [tokens[b, a] for a in line[1:]]
            assert out_depths[row] == len(line) - 1 and out_tokens[row] == tokens[b, c]
            assert out_parents[row] == (-1 if c == 0 else cu[b] + local[-2])
            row += 1
    assert chains == all(p in (-1, r - 1) for r, p in enumerate(out_parents))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 10))
def test_accept_rows_follows_matches_and_advances(seed: int, num_seqs: int, num_candidates: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, num_candidates) for _ in range(num_seqs)]
    for tree in trees:  # siblings differ, as drafters propose distinct children
        tree[0][:] = np.arange(num_candidates) % 4 + 10 * tree[1]
    tokens, parents, depths, keep = (np.stack([t[i] for t in trees]) for i in range(4))
    token_ids, row_parents, _, cu, _, _, _ = pack_rows(tokens, parents, depths, keep, int(depths.max()))
    sampled = np.array([rng.choice(token_ids) if rng.random() < 0.7 else 999 for _ in token_ids])
    lanes = rng.permutation(8)[:num_seqs].astype(np.int64)
    context = rng.integers(0, 9, 8).astype(np.int32)
    history, history_lens = np.full((8, 64), -7, np.int32), context + 1
    before_lens, before_context = history_lens.copy(), context.copy()
    max_lens = (history_lens + rng.integers(1, 6, 8)).astype(np.int32)
    end_ids = np.full((8, 3), -1, np.int32)
    end_ids[:, 0] = token_ids[-1]
    finished = rng.random(8) < 0.2
    was_finished = finished.copy()
    page_table = rng.permutation(64)[: 8 * 8].reshape(8, 8).astype(np.int32)
    got_tokens, counts, matched, rows, slots, positions, seqs, before = accept_rows(
        lanes, cu, row_parents, token_ids, sampled, np.ones(num_seqs, np.bool_), num_seqs, int(depths.max()),
        history, history_lens, context, end_ids, max_lens, finished, page_table, 4,
    )  # fmt: skip
    n = 0
    for b, lane in enumerate(lanes):
        if was_finished[lane]:
            assert counts[b] == 0 and history_lens[lane] == before_lens[lane]
            continue
        path = [int(cu[b])]
        while True:
            here = path[-1]
            nxt = [r for r in range(here + 1, cu[b + 1]) if row_parents[r] == here and token_ids[r] == sampled[here]]
            if not nxt:
                break
            path.append(nxt[0])
        assert matched[b] == len(path) - 1
        new = [int(sampled[r]) for r in path]
        for i, token in enumerate(new):
            if token == end_ids[lane, 0]:
                new = new[: i + 1]
                break
        new = new[: max_lens[lane] - before_lens[lane]]
        assert got_tokens[b, : counts[b]].tolist() == new and counts[b] == len(new)
        assert history[lane, before_lens[lane] : history_lens[lane]].tolist() == new
        assert context[lane] == before_context[lane] + len(new)
        assert finished[lane] == (new[-1] == end_ids[lane, 0] or history_lens[lane] == max_lens[lane])
        for i in range(len(new)):
            position = before_context[lane] + i
            assert (rows[n], positions[n], seqs[n]) == (path[i], position, b)
            assert slots[n] == page_table[lane, position // 4] * 4 + position % 4
            assert before[n] == (n - 1 if i else -1)
            n += 1
    assert n == len(rows)
