"""Proof 2 in effect: under speculation the engine's tokens follow the target's shaped distribution (chi-square).

One prompt, many seeds. The first token comes from the prompt's forward, the next three from verified drafts. What is
expected is worked out here from the target's logits, forward by forward, without the engine or its sampler.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
import torch
from rig import engine, models, run
from scipy.stats import chisquare

from parity.paged_feed import PagedFeed
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.types import SamplingParams

PROMPT = (21, 90, 133, 60, 212)
TEMPERATURE, TOP_K = 1.4, 8
NUM_SEEDS, NUM_TOKENS = 800, 4
Path = tuple[int, ...]


AT_ONCE = 16
"""Paths per forward of the target."""
_logits: dict[Path, torch.Tensor] = {}


def logits_after(paths: list[Path]) -> list[torch.Tensor]:
    """[V] float64 each: the target's logits after the prompt and each of the (equally long) paths."""
    target, _ = models()
    unknown = sorted(set(paths) - _logits.keys())
    for first in range(0, len(unknown), AT_ONCE):
        some = unknown[first : first + AT_ONCE]
        feed = PagedFeed(target.info, AT_ONCE)
        texts = [[*PROMPT, *path] for path in (some * AT_ONCE)[:AT_ONCE]]
        ends = [(i + 1) * len(texts[0]) - 1 for i in range(len(some))]
        logits = target.forward(feed.batch(texts, ends), feed.pool).logits
        _logits.update(zip(some, logits, strict=True))
    return [_logits[path] for path in paths]


def next_tokens(paths: list[Path], temperature: float) -> list[dict[int, float]]:
    """Probabilities of the TOP_K tokens that may follow each path."""
    best = [logits.topk(TOP_K) for logits in logits_after(paths)]
    return [dict(zip(ids.tolist(), (top / temperature).softmax(0).tolist(), strict=True)) for top, ids in best]


def path_chances(length: int, temperature: float) -> dict[Path, float]:
    """Probability of every path of so many tokens."""
    chances: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        following = next_tokens(list(chances), temperature)
        chances = {
            (*path, token): chance * share
            for (path, chance), shares in zip(chances.items(), following, strict=True)
            for token, share in shares.items()
        }
    return chances


def p_value(seen: list[Path], expected: dict[Path, float]) -> float:
    """Chi-square of what was seen; cells expected fewer than 5 times are one cell. An impossible path gives 0."""
    counts = Counter(seen)
    if counts.keys() - expected.keys():
        return 0.0
    common = [path for path, chance in expected.items() if chance * len(seen) >= 5]
    observed = [counts[path] for path in common]
    wanted = [expected[path] * len(seen) for path in common]
    if len(common) < len(expected):
        observed, wanted = [*observed, len(seen) - sum(observed)], [*wanted, len(seen) - sum(wanted)]
    assert len(common) >= 6, "too few cells to tell anything"
    return float(chisquare(np.array(observed), np.array(wanted)).pvalue)


PLANS = [OFF, chain(1), chain(3), chain(7), tree(3, 2, 8), tree(5, 4, 16), "random"]
"""Plans between these give the same tokens by test_lossless."""


@lru_cache(maxsize=len(PLANS))
def sampled_paths(plan: Rule | str) -> list[Path]:
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        for seed in range(NUM_SEEDS)
    ]
    with engine(plan, lanes=32, max_model_len=32) as built:
        outputs = run(built, [PROMPT] * NUM_SEEDS, params)
        accepted, drafted = built.metrics().num_accepted_tokens, built.metrics().num_draft_tokens
    assert plan == OFF or NUM_SEEDS / 4 < accepted < 0.8 * drafted, "drafts must be accepted and rejected"
    return [tuple(outputs[f"r{seed}", 0]) for seed in range(NUM_SEEDS)]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_paths_follow_the_shaped_distribution(plan: Rule | str, length: int) -> None:
    seen = [path[:length] for path in sampled_paths(plan)]
    assert p_value(seen, path_chances(length, TEMPERATURE)) > 1e-4


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_fourth_token_follows_what_stands_before_it(plan: Rule | str) -> None:
    """Its place in its own distribution (probability integral, randomised within the token) is uniform."""
    source, bins = np.random.default_rng(0), Counter[int]()
    paths = sampled_paths(plan)
    for path, chances in zip(paths, next_tokens([path[:3] for path in paths], TEMPERATURE), strict=True):
        below = 0.0
        for token, chance in sorted(chances.items()):
            if token == path[3]:
                bins[int(10 * (below + source.random() * chance))] += 1
            below += chance
    assert sum(bins.values()) == NUM_SEEDS
    assert chisquare([bins[i] for i in range(10)]).pvalue > 1e-4


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_another_temperature_is_told_apart(plan: Rule | str) -> None:
    seen = [path[:2] for path in sampled_paths(plan)]
    assert p_value(seen, path_chances(2, 0.75 * TEMPERATURE)) < 1e-6
