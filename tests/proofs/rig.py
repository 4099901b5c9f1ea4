"""Small engines on random models, for the standing proofs (DESIGN section 11)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import tokenizers
import torch

from wingbeat.engine.config import EngineConfig
from wingbeat.engine.engine import Engine
from wingbeat.models.random import random_drafter, random_target
from wingbeat.spec.cost import CostTable
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.spec.policy import Decision, LoadSnapshot, parse_policy
from wingbeat.spec.stats import AcceptStats
from wingbeat.text.tokenizer import Tokenizer, byte_level_table
from wingbeat.types import ChoiceDelta, Request, SamplingParams

VOCAB = 256
EOS = 7
PLANS = [OFF, *(chain(k) for k in range(1, 8)), tree(3, 2, 8), tree(5, 4, 16)]


@dataclass(frozen=True, slots=True)
class RandomPlans:
    """Another plan at every step."""

    source: random.Random
    spec: str = "random"

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision:
        return Decision(rule=self.source.choice(PLANS))


def models(vocab: int = VOCAB):
    """A target and a drafter that knows about four fifths of the vocabulary; the same two at every call."""
    return _models(vocab)


@lru_cache(maxsize=4)
def _models(vocab: int):
    target = random_target(vocab_size=vocab, eos_token_ids=(EOS,), dtype=torch.float64)
    return target, random_drafter(target, draft_vocab_size=vocab * 200 // VOCAB)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """One token per byte; EOS ends."""
    letters = dict(sorted(byte_level_table().items()))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(EOS,))


@contextmanager
def engine(
    plan: Rule | str = OFF,
    *,
    drafter: bool = True,
    page_size: int = 16,
    num_pages: int | None = None,
    max_rows: int = 512,
    lanes: int = 8,
    loop: str = "plain",
    prefix: bool = True,
    max_model_len: int = 256,
    vocab: int = VOCAB,
) -> Iterator[Engine]:
    target, speaker = models(vocab)
    config = EngineConfig(
        model="random",
        policy="off",
        max_model_len=max_model_len,
        max_num_seqs=lanes,
        max_num_batched_tokens=max_rows,
        block_size=page_size,
        num_gpu_blocks_override=num_pages,
        dtype="float64",
        loop=loop,  # type: ignore[arg-type]
        enable_prefix_caching=prefix,
    )
    built = Engine(config, target, speaker if drafter else None, byte_tokenizer())
    if plan == "random":
        built._core.policy = RandomPlans(random.Random(1))
    elif drafter:
        built._core.policy = parse_policy(f"always:{plan}" if plan != OFF else "off", chain(3))
    try:
        yield built
    finally:
        built.close()


def prompts(count: int, seed: int = 0, longest: int = 60, first: int = 8, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    """Random tokens from `first` on."""
    source = random.Random(seed)
    return [tuple(source.randrange(first, vocab) for _ in range(source.randint(1, longest))) for _ in range(count)]


Key = tuple[str, int]
Outputs = dict[Key, list[int]]


def run(
    built: Engine, texts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], *, stagger: int = 0
) -> Outputs:
    """Tokens by (request, choice). `stagger`: a new request arrives every so many steps."""
    outputs: Outputs = {}
    for delta in deltas(built, texts, params, stagger):
        outputs.setdefault((delta.request_id, delta.choice_index), []).extend(delta.token_ids)
    return outputs


def run_with_logprobs(
    built: Engine, texts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
) -> tuple[Outputs, dict[Key, list[float]]]:
    """Tokens and their logprobs, for `params` that ask for them.

    A token of a small model hardly depends on any one earlier token's K/V, its logprob does.
    """
    outputs: Outputs = {}
    logprobs: dict[Key, list[float]] = {}
    for delta in deltas(built, texts, params):
        key = delta.request_id, delta.choice_index
        outputs.setdefault(key, []).extend(delta.token_ids)
        logprobs.setdefault(key, []).extend(entry.logprob for entry in delta.logprobs or ())
    assert [len(each) for each in logprobs.values()] == [len(each) for each in outputs.values()]
    return outputs, logprobs


def deltas(
    built: Engine, texts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], stagger: int = 0
) -> Iterator[ChoiceDelta]:
    """Runs the engine to the end; no page may leak."""
    waiting = [
        Request(request_id=f"r{i}", prompt_token_ids=text, params=each)
        for i, (text, each) in enumerate(zip(texts, params, strict=True))
    ]
    step = 0
    while waiting or built.has_work():
        while waiting and (stagger == 0 or step % stagger == 0):
            built.add(waiting.pop(0))
            if stagger:
                break
        for delta in built.step():
            assert delta.error is None
            yield delta
        step += 1
        assert step < 4_000, "the engine does not finish"
    built._prefix.pages.check()
    assert built._prefix.pages.num_held == 0, "pages leaked"
