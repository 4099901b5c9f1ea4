"""LLM: the engine in process, for scripts and tests.

llm = LLM(model="smollm2", policy="auto")
outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from wingbeat.engine.config import EngineConfig
from wingbeat.engine.engine import Engine
from wingbeat.errors import EngineError, RequestError
from wingbeat.types import ChoiceDelta, ChoiceStats, FinishReason, Request, SamplingParams, TokenLogprob

Prompt = str | Sequence[int]


@dataclass(slots=True, kw_only=True)
class Completion:
    """One choice of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: ChoiceStats | None = None

    def add(self, delta: ChoiceDelta) -> None:
        if delta.error is not None:
            raise EngineError(delta.error)
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.stats = delta.finish_reason, delta.stop_reason, delta.stats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt."""

    prompt_token_ids: tuple[int, ...]
    choices: list[Completion]


class LLM:
    """An engine of one's own. Keyword arguments are EngineConfig's fields."""

    def __init__(self, model: str = "smollm2", *, engine: Engine | None = None, **settings: Any) -> None:
        self.engine = engine or Engine.from_config(EngineConfig(model=model, **settings))
        self._ids = count()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completions of strings or token-id lists, in order. One SamplingParams for all, or one each."""
        listed = _as_list(prompts)
        chosen = _params_for(params, len(listed))
        requests = [
            Request(
                request_id=f"llm-{next(self._ids)}",
                prompt_token_ids=tuple(self._tokenize(prompt)),
                params=each,
            )
            for prompt, each in zip(listed, chosen, strict=True)
        ]
        return self.run(requests)

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to conversations given as OpenAI messages."""
        return self.generate([self.engine.encode_chat(messages) for messages in conversations], params)

    def run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Runs prepared requests to their end."""
        outputs = {
            r.request_id: RequestOutput(
                prompt_token_ids=r.prompt_token_ids, choices=[Completion() for _ in range(r.params.n)]
            )
            for r in requests
        }
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            for delta in self.engine.step():
                outputs[delta.request_id].choices[delta.choice_index].add(delta)
        return [outputs[r.request_id] for r in requests]

    def close(self) -> None:
        self.engine.close()

    def _tokenize(self, prompt: Prompt) -> Sequence[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and isinstance(listed[0], int):
        return [[token for token in listed if isinstance(token, int)]]
    return [prompt for prompt in listed if not isinstance(prompt, int)]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count_: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count_
    if isinstance(params, SamplingParams):
        return [params] * count_
    if len(params) != count_:
        raise RequestError("params", f"{len(params)} entries", f"one for all prompts, or one each ({count_})")
    return list(params)
