"""Sampling: both backends agree, tokens follow the shaped distribution, and only the row's own prefix matters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from wingbeat.kernels.noise import gumbel, noise_bits, noise_key
from wingbeat.kernels.sample_cpu import CpuSampler
from wingbeat.kernels.sample_torch import TorchSampler, keep_mask
from wingbeat.kernels.sampling import Sampler, SamplingBatch, SamplingRows

SAMPLERS = [TorchSampler(), CpuSampler()]


def make_batch(num_seqs: int, **settings: object) -> SamplingBatch:
    """Neutral settings for all sequences; keyword values are broadcast."""

    def vector(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(settings.get(name, neutral), dtype=dtype).expand(num_seqs).contiguous()

    history = torch.as_tensor(settings.get("history", [[3, 4, 5, 6]]), dtype=torch.int32)
    stop_ids = torch.as_tensor(settings.get("stop_ids", [[-1]]), dtype=torch.int32)
    bias_ids = torch.as_tensor(settings.get("bias_ids", [[-1]]), dtype=torch.int32)
    return SamplingBatch(
        temperature=vector("temperature", 0.0, torch.float32),
        top_k=vector("top_k", 0, torch.int32),
        top_p=vector("top_p", 1.0, torch.float32),
        min_p=vector("min_p", 0.0, torch.float32),
        presence_penalty=vector("presence_penalty", 0.0, torch.float32),
        frequency_penalty=vector("frequency_penalty", 0.0, torch.float32),
        repetition_penalty=vector("repetition_penalty", 1.0, torch.float32),
        noise_key=torch.as_tensor(
            settings.get("noise_key", [noise_key(7, i) for i in range(num_seqs)]), dtype=torch.int64
        ),
        history=history.expand(num_seqs, -1).contiguous(),
        history_lens=vector("history_lens", history.shape[1], torch.int32),
        prompt_lens=vector("prompt_lens", 2, torch.int32),
        min_tokens=vector("min_tokens", 0, torch.int32),
        stop_ids=stop_ids.expand(num_seqs, -1).contiguous(),
        bias_ids=bias_ids.expand(num_seqs, -1).contiguous(),
        bias_values=torch.as_tensor(settings.get("bias_values", [[0.0]]), dtype=torch.float32)
        .expand(num_seqs, -1)
        .contiguous(),
    )


def rows(num: int, ancestors: list[list[int]] | None = None, allowed: Tensor | None = None) -> SamplingRows:
    paths = torch.tensor(ancestors or [[]] * num, dtype=torch.int32).reshape(num, -1)
    return SamplingRows(seq=torch.arange(num, dtype=torch.int32), ancestors=paths, allowed=allowed)


SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.01},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4, "history": [[3, 3, 3, 9, 9, 8]], "prompt_lens": 3},
    {"temperature": 1.0, "min_tokens": 4, "stop_ids": [[0, 1, 2, -1]]},
    {"temperature": 1.0, "bias_ids": [[5, 6, -1]], "bias_values": [[50.0, -50.0, 0.0]]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [11, 64, 1000, 5003])
def test_backends_agree(settings: dict, vocab: int) -> None:
    num = 48
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(num, vocab, generator=generator)
    paths = torch.randint(0, vocab, (num, 2), generator=generator)
    paths[::3, 1] = -1
    batch, which = make_batch(num, **settings), rows(num, paths.tolist())
    tokens = [sampler.sample(logits.clone(), batch, which) for sampler in SAMPLERS]
    assert torch.equal(*tokens)
    assert len(set(tokens[0].tolist())) > 1 or vocab < 20 or settings.get("bias_ids")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_degenerate_rows(sampler: Sampler) -> None:
    vocab = 40
    equal = torch.zeros(1, vocab)
    assert sampler.sample(equal.clone(), make_batch(1), rows(1)).item() == 0  # the lower id on ties
    one = torch.full((1, vocab), float("-inf"))
    one[0, 17] = -3.0
    for settings in SETTINGS[:7]:
        assert sampler.sample(one.clone(), make_batch(1, **settings), rows(1)).item() == 17
    top1 = {sampler.sample(equal.clone(), make_batch(1, temperature=1.0, top_k=3, noise_key=[k]), rows(1)).item()
            for k in range(200)}  # fmt: skip
    assert top1 == {0, 1, 2}  # ties at the boundary: lower ids are kept
    for bad in (float("nan"), float("inf")):
        broken = torch.randn(1, vocab)
        broken[0, 3] = bad
        assert sampler.sample(broken, make_batch(1, temperature=1.0), rows(1)).item() == -1
    nothing = torch.full((1, vocab), float("-inf"))
    assert sampler.sample(nothing, make_batch(1), rows(1)).item() == -1


@pytest.mark.parametrize("settings", [s for s in SETTINGS if s.get("temperature")], ids=str)
def test_tokens_follow_the_shaped_distribution(settings: dict) -> None:
    vocab, draws = 12, 6000
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    batch = make_batch(draws, noise_key=[noise_key(seed, 0) for seed in range(draws)], **settings)
    tokens = CpuSampler().sample(logits.expand(draws, -1).clone(), batch, rows(draws))
    from wingbeat.kernels.sample_torch import shape_row

    z = shape_row(logits, batch, 0, [], None)
    s = (z - z.max()) / float(batch.temperature[0])
    keep = keep_mask(s, int(batch.top_k[0]), float(batch.top_p[0]), float(batch.min_p[0]))
    p = s.masked_fill(~keep, float("-inf")).softmax(0).numpy()
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[p == 0].sum() == 0
    likely = p * draws > 5
    if likely.sum() > 1:
        observed = np.append(counts[likely], counts[~likely].sum())
        expected = np.append(p[likely] * draws, max(p[~likely].sum() * draws, 1e-9))
        usable = expected > 1
        result = stats.chisquare(observed[usable], expected[usable] * observed[usable].sum() / expected[usable].sum())
        assert result.pvalue > 1e-4


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_in_flight_ancestors_count_like_history(sampler: Sampler) -> None:
    """A row below drafts a, b samples as if a, b had been committed: penalties, min_tokens and noise position."""
    vocab, path = 50, [7, 9]
    settings = {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7,
                "min_tokens": 4, "stop_ids": [[1, 2]]}  # fmt: skip
    for seed in range(30):
        logits = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
        logits[0, [*path, 1, 2]] += 4  # wanted, so that it tells whether they are penalised and barred
        flying = sampler.sample(logits.clone(), make_batch(1, **settings), rows(1, [[*path, -1]]))
        history = [[3, 4, 5, 6, *path]]
        committed = sampler.sample(logits.clone(), make_batch(1, history=history, **settings), rows(1))
        assert flying.item() == committed.item()


def test_rows_do_not_influence_one_another() -> None:
    num, vocab = 33, 300
    logits = 2 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(0))
    batch = make_batch(num, temperature=0.9, top_p=0.9)
    together = CpuSampler().sample(logits.clone(), batch, rows(num))
    for i in range(num):
        alone = SamplingRows(seq=torch.tensor([i], dtype=torch.int32), ancestors=torch.empty(1, 0, dtype=torch.int32))
        assert CpuSampler().sample(logits[i : i + 1].clone(), batch, alone).item() == together[i].item()


def test_grammar_masks_bar_tokens() -> None:
    vocab = 70
    allowed = torch.zeros(1, 3, dtype=torch.int32)
    allowed[0, 2] = 1 << 3
    for sampler in SAMPLERS:
        logits = torch.randn(1, vocab)
        assert sampler.sample(logits, make_batch(1, temperature=1.0), rows(1, allowed=allowed)).item() == 67


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_proposals_agree_between_backends(temperature: float) -> None:
    num, draft_vocab = 24, 777
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(num, draft_vocab, generator=generator)
    ids = torch.randperm(2000, generator=generator)[:draft_vocab].sort().values
    batch = make_batch(num, temperature=temperature)
    seq, positions = torch.arange(num), torch.arange(num)
    outs = [s.propose_topk(logits.clone(), ids, batch, seq, positions, 4) for s in SAMPLERS]
    assert torch.equal(outs[0][0], outs[1][0])
    torch.testing.assert_close(outs[0][1], outs[1][1], rtol=1e-4, atol=1e-6)
    assert bool((outs[0][1].sum(1) <= 1.0).all()) and bool((outs[0][1].diff(dim=1) <= 0).all())


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_shared_dice_make_a_good_drafter_agree(spread: float) -> None:
    """Agreement is at least (1-d)/(1+d), d the total variation distance of draft and target."""
    vocab, draws = 40, 4000
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(vocab, generator=generator)
    draft = target + spread * torch.randn(vocab, generator=generator)
    batch = make_batch(draws, temperature=1.0, noise_key=[noise_key(seed, 0) for seed in range(draws)])
    sampled = CpuSampler().sample(target.expand(draws, -1).clone(), batch, rows(draws))
    positions = torch.full((draws,), 4)
    guesses, chance = CpuSampler().propose_topk(
        draft.expand(draws, -1).contiguous(), torch.arange(vocab), batch, torch.arange(draws), positions, 1
    )
    hit = guesses[:, 0] == sampled
    distance = 0.5 * (target.softmax(0) - draft.softmax(0)).abs().sum().item()
    assert hit.double().mean().item() > (1 - distance) / (1 + distance) - 0.02
    assert chance[hit].mean() > chance[~hit].mean()


def test_noise_is_uniform_and_independent() -> None:
    tokens = torch.arange(20000)
    bits = noise_bits(torch.tensor(noise_key(1, 0)), torch.tensor(5), tokens).double().numpy() / 2**32
    assert stats.kstest(bits, "uniform").pvalue > 1e-3
    others = [
        noise_bits(torch.tensor(noise_key(1, 0)), torch.tensor(6), tokens),
        noise_bits(torch.tensor(noise_key(1, 1)), torch.tensor(5), tokens),
        noise_bits(torch.tensor(noise_key(2, 0)), torch.tensor(5), tokens),
        noise_bits(torch.tensor(noise_key(1, 0)), torch.tensor(5), tokens + 1),
    ]
    for other in others:
        assert abs(np.corrcoef(bits, other.double().numpy())[0, 1]) < 0.03
    by_position = noise_bits(torch.tensor(noise_key(1, 0)), torch.arange(20000), torch.tensor(7)).double().numpy()
    assert stats.kstest(by_position / 2**32, "uniform").pvalue > 1e-3
    assert gumbel(torch.tensor(3), torch.tensor(1), tokens).mean().item() == pytest.approx(0.5772, abs=0.03)


def test_same_seed_same_tokens() -> None:
    logits, batch = torch.randn(8, 100), make_batch(8, temperature=1.0)
    first = CpuSampler().sample(logits.clone(), batch, rows(8))
    assert torch.equal(first, CpuSampler().sample(logits.clone(), batch, rows(8)))
    other = replace(batch, noise_key=torch.tensor([noise_key(8, i) for i in range(8)]))
    assert not torch.equal(first, CpuSampler().sample(logits.clone(), other, rows(8)))
