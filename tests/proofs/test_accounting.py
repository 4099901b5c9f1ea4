"""What is told of an answer is true under every plan: counts add up; text, ends and logprobs are plain decoding's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from rig import EOS, PLANS, engine, prompts

from wingbeat.engine.engine import Engine
from wingbeat.spec.plan import OFF, Rule, chain, tree
from wingbeat.types import ChoiceStats, Request, SamplingParams, TokenLogprob

TEXTS = prompts(6, seed=4, longest=30)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@dataclass
class Told:
    """Everything the engine said of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None
    stats: ChoiceStats | None = None


def tell(built: Engine, params: list[SamplingParams]) -> list[Told]:
    told = [Told() for _ in params]
    for i, (text, each) in enumerate(zip(TEXTS, params, strict=True)):
        built.add(Request(request_id=str(i), prompt_token_ids=text, params=each))
    while built.has_work():
        for delta in built.step():
            one = told[int(delta.request_id)]
            one.tokens.extend(delta.token_ids)
            one.text += delta.text
            one.logprobs.extend(delta.logprobs or ())
            one.reason, one.stop, one.stats = delta.finish_reason, delta.stop_reason, delta.stats
    return told


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [*PLANS, "random"], ids=str)
def test_tokens_are_forwards_and_accepted_drafts(plan: Rule | str, loop: str) -> None:
    with engine(plan, loop=loop, lanes=4) as built:
        told, metrics = tell(built, [GREEDY] * len(TEXTS)), built.metrics()
    stats = [one.stats for one in told]
    for one, counts in zip(told, stats, strict=True):
        assert counts is not None
        assert counts.num_output_tokens == len(one.tokens) == GREEDY.max_tokens
        assert counts.num_output_tokens == counts.num_target_forwards + counts.num_accepted_drafts
        assert counts.num_accepted_drafts == sum(counts.accepted_per_pos)
        assert counts.num_draft_steps == (counts.drafted_per_pos[0] if counts.drafted_per_pos else 0)
        assert counts.num_draft_steps < counts.num_target_forwards  # the first token comes from the prompt's forward
        for deeper in (counts.accepted_per_pos, counts.drafted_per_pos):
            assert list(deeper) == sorted(deeper, reverse=True)
        if plan != "random" and plan.topk == 1:
            assert counts.num_draft_tokens == sum(counts.drafted_per_pos)
    assert metrics.generation_tokens == sum(len(one.tokens) for one in told)
    for total, name in (
        (metrics.num_drafts, "num_draft_steps"),
        (metrics.num_draft_tokens, "num_draft_tokens"),
        (metrics.num_accepted_tokens, "num_accepted_drafts"),
    ):
        assert total == sum(getattr(counts, name) for counts in stats), name
    assert (metrics.num_accepted_tokens > 20) == (plan != OFF)


@pytest.fixture(scope="module")
def plain_words() -> list[Told]:
    with engine(drafter=False) as built:
        return tell(built, [replace(GREEDY, max_tokens=20)] * len(TEXTS))


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("plan", [chain(7), tree(5, 4, 16)], ids=str)
def test_text_ends_and_logprobs_are_those_of_plain_decoding(plan: Rule, loop: str, plain_words: list[Told]) -> None:
    """Ends of every kind, wherever a verified block happens to reach over them."""
    words = plain_words
    params = [
        replace(GREEDY, stop_token_ids=(words[0].tokens[10],), logprobs=2),
        replace(GREEDY, stop=(words[1].text[6:8],), logprobs=0),
        replace(GREEDY, stop=(words[2].text[3:6], "absent"), include_stop_str_in_output=True),
        replace(GREEDY, max_tokens=13, logprobs=5),
        replace(GREEDY, ignore_eos=False, logit_bias={EOS: 14.0}),
        replace(GREEDY, stop_token_ids=(words[5].tokens[5],), min_tokens=9, logprobs=1),
    ]
    with engine(drafter=False) as built:
        wanted = tell(built, params)
    with engine(plan, loop=loop) as built:
        found = tell(built, params)
    assert {one.reason for one in wanted} == {"stop", "length"}
    for mine, plain in zip(found, wanted, strict=True):
        assert (mine.tokens, mine.text, mine.reason, mine.stop) == (plain.tokens, plain.text, plain.reason, plain.stop)
        assert [entry.token_id for entry in mine.logprobs] == [entry.token_id for entry in plain.logprobs]
        assert [entry.logprob for entry in mine.logprobs] == pytest.approx([entry.logprob for entry in plain.logprobs])
        assert len(mine.logprobs) in (0, len(mine.tokens))
    assert [len(one.logprobs) > 0 for one in found] == [each.logprobs is not None for each in params]
    assert sum(one.stats.num_accepted_drafts for one in found if one.stats) > 10
