"""FakeEngine: the engine's contract without a model, for the server's tests. Says a reply or follows a grammar."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from wingbeat.engine.metrics import Beliefs, EngineInfo, EngineMetrics, SpeculationState
from wingbeat.errors import CapacityError, RequestError, unknown_name
from wingbeat.text.detokenize import Detokenizer
from wingbeat.text.grammar import GrammarCompiler, Matcher
from wingbeat.text.template import ChatTemplate
from wingbeat.text.test_detokenize import EOS, byte_tokenizer
from wingbeat.types import ChoiceDelta, ChoiceStats, Request, SamplingParams, TokenLogprob

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
LIKED = '"}]x'
"""What the fake prefers where a grammar lets it choose."""


@dataclass
class FakeChoice:
    request: Request
    index: int
    script: list[int]
    detokenizer: Detokenizer
    matcher: Matcher | None
    sent: list[int] = field(default_factory=list)

    def next_tokens(self, count: int) -> list[int]:
        if self.matcher is None:
            return self.script[len(self.sent) : len(self.sent) + count]
        (mask,) = self.matcher.bitmasks([[]])
        allowed = set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        liked = [EOS, *byte_tokenizer().encode(LIKED)]
        token = next((t for t in liked if t in allowed), min(allowed))
        self.matcher.advance([token])
        return [token]


class FakeEngine:
    """Two tokens per step and choice, `delay_s` per step; fails on the step after `break_with` is set."""

    def __init__(self, reply: str = "Hello world", *, delay_s: float = 0.0, tokens_per_step: int = 2) -> None:
        self.tokenizer = byte_tokenizer()
        self.tokenizer.template = ChatTemplate(TEMPLATE, {})
        self.model_name, self.max_model_len = "fake", 500
        self.reply, self.delay_s, self.tokens_per_step = reply, delay_s, tokens_per_step
        self.break_with: Exception | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.policy, self.threads = "auto", set()
        self.num_steps = self.num_resets = 0
        self._choices: list[FakeChoice] = []
        self.grammars = GrammarCompiler(self.tokenizer)
        self._finished: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        room = self.max_model_len - len(request.prompt_token_ids)
        if not request.prompt_token_ids:
            raise RequestError("prompt", "no tokens", "at least one token")
        if room < 1:
            raise CapacityError(
                "prompt", f"{len(request.prompt_token_ids)} tokens", f"at most {self.max_model_len - 1}"
            )
        grammar = self.grammars.compile(request.json_schema) if request.json_schema is not None else None
        self.requests.append(request)
        script = [*self.tokenizer.encode(self.reply), EOS]
        for index in range(request.params.n):
            matcher = grammar.matcher() if grammar is not None else None
            detokenizer = Detokenizer(self.tokenizer, request.params)
            self._choices.append(FakeChoice(request, index, script, detokenizer, matcher))

    def abort(self, request_id: str) -> None:
        gone = [c for c in self._choices if c.request.request_id == request_id]
        self.aborted.extend({c.request.request_id for c in gone})
        self._choices = [c for c in self._choices if c not in gone]

    def has_work(self) -> bool:
        return bool(self._choices)

    def step(self) -> list[ChoiceDelta]:
        time.sleep(self.delay_s)
        if self.break_with is not None:
            raise self.break_with
        self.num_steps += 1
        deltas = [self._advance(choice) for choice in self._choices]
        ended = {(d.request_id, d.choice_index) for d in deltas if d.finish_reason is not None}
        self._choices = [c for c in self._choices if (c.request.request_id, c.index) not in ended]
        return deltas

    def _advance(self, choice: FakeChoice) -> ChoiceDelta:
        params = choice.request.params
        limit = params.max_tokens or self.max_model_len
        tokens = choice.next_tokens(min(self.tokens_per_step, limit - len(choice.sent)))
        update = choice.detokenizer.append(tokens)
        kept = tokens[: update.num_tokens_kept]
        choice.sent.extend(kept)
        text, reason = update.text, None
        if update.stop is not None or kept[-1] == EOS:
            reason = "stop"
        elif len(choice.sent) >= limit:
            reason = "length"
        if reason is not None:
            text += "" if update.stop else choice.detokenizer.finish()
            self._finished[reason] = self._finished.get(reason, 0) + 1
        return ChoiceDelta(
            request_id=choice.request.request_id,
            choice_index=choice.index,
            token_ids=tuple(kept),
            text=text,
            logprobs=_logprobs(kept, params),
            finish_reason=reason,
            stop_reason=update.stop,
            stats=_stats(choice) if reason else None,
        )

    def set_policy(self, spec: str) -> None:
        if spec not in ("off", "auto"):
            raise unknown_name("policy", spec, ("off", "auto"))
        self.policy = spec

    def reset_prefix_cache(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_resets += 1

    def speculation(self) -> SpeculationState:
        beliefs = Beliefs(
            acceptance=(0.5,),
            predicted_tokens_per_s=None,
            predicted_off_tokens_per_s=None,
            achieved_tokens_per_s=1.0,
            reason="fake",
        )
        return SpeculationState(
            policy=self.policy,
            plan="off",
            depth=0,
            topk=1,
            rows=len(self._choices),
            num_running=len(self._choices),
            num_waiting=0,
            drafter=None,
            beliefs=beliefs,
            timeline=(),
        )

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            finished=self._finished, accepted_per_pos=[3, 1], drafted_per_pos=[4, 4], draft_seconds=0.5
        )

    def info(self) -> EngineInfo:
        return EngineInfo(
            version="0",
            model="fake",
            architecture="None",
            target_digest="abc",
            drafter=None,
            drafter_digest=None,
            dtype="float32",
            device="cpu",
            kernels="torch",
            num_threads=1,
            max_model_len=self.max_model_len,
            num_pages=1,
            page_size=1,
            config={},
        )

    def close(self) -> None:
        self.break_with = RuntimeError("closed")


def _logprobs(tokens: list[int], params: SamplingParams) -> tuple[TokenLogprob, ...] | None:
    if params.logprobs is None:
        return None
    top = ((EOS, -0.5),) * min(params.logprobs, 1)
    return tuple(TokenLogprob(token_id=token, logprob=-1.0, top=top) for token in tokens)


def _stats(choice: FakeChoice) -> ChoiceStats:
    return ChoiceStats(
        num_prompt_tokens=len(choice.request.prompt_token_ids),
        num_cached_tokens=1,
        num_output_tokens=len(choice.sent),
        num_target_forwards=2,
        num_draft_steps=2,
        num_draft_tokens=6,
        num_accepted_drafts=len(choice.sent) - 2,
        accepted_per_pos=(2, 1),
        drafted_per_pos=(2, 2),
    )


def test_it_says_its_reply() -> None:
    engine, text = FakeEngine("abc"), ""
    engine.add(Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9)))
    while engine.has_work():
        text += "".join(delta.text for delta in engine.step())
    assert text == "abc"
