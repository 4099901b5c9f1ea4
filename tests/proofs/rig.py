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
from wingbeat.types import Request, SamplingParams

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


@lru_cache(maxsize=4)
def models(seed: int = 0, dtype: torch.dtype = torch.float64):
    target = random_target(vocab_size=VOCAB, eos_token_ids=(EOS,), seed=seed, dtype=dtype)
    return target, random_drafter(target, draft_vocab_size=200)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """One token per byte; EOS ends."""
    letters = {letter: value for letter, value in sorted((c, b) for c, b in byte_level_table().items())}
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
) -> Iterator[Engine]:
    target, speaker = models()
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


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [
        tuple(source.randrange(8, VOCAB) for _ in range(source.randint(1, longest))) for _ in range(count)
    ]


Outputs = dict[tuple[str, int], list[int]]


def run(
    built: Engine, texts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], *, stagger: int = 0
) -> Outputs:
    """Tokens by (request, choice). `stagger`: a new request arrives every so many steps."""
    waiting = [
        Request(request_id=f"r{i}", prompt_token_ids=text, params=each)
        for i, (text, each) in enumerate(zip(texts, params, strict=True))
    ]
    outputs: Outputs = {}
    step = 0
    while waiting or built.has_work():
        while waiting and (stagger == 0 or step % stagger == 0):
            built.add(waiting.pop(0))
            if stagger:
                break
        for delta in built.step():
            assert delta.error is None
            outputs.setdefault((delta.request_id, delta.choice_index), []).extend(delta.token_ids)
        step += 1
        assert step < 20_000, "the engine does not finish"
    built._prefix.pages.check()
    assert built._prefix.pages.num_held == 0, "pages leaked"
    return outputs
