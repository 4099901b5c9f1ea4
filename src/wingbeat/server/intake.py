"""Bodies to requests: defaults, tools, grammars, prompts to token ids. What cannot be honoured is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from wingbeat.errors import CapacityError, RequestError
from wingbeat.server.schema import Body, ChatBody, CompletionBody, NamedTool
from wingbeat.text.template import check_messages
from wingbeat.text.tokenizer import Tokenizer
from wingbeat.text.tool_calls import MAX_CALLS, calls_schema, parameters_of, with_tools_inline
from wingbeat.types import Request, SamplingParams

log = logging.getLogger(__name__)

MAX_PROMPTS = 128
MAX_INT = 2**31 - 1

# Fields that would change the answer if they were honoured, with the values that mean "as usual" and a way out.
UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "only 1; use n"),
    "suffix": (("",), "only null"),
    "echo": ((False,), "only false"),
    "prompt_logprobs": ((), "only null"),
    "use_beam_search": ((False,), "only false"),
    "modalities": ((["text"],), 'only ["text"]'),
    "audio": ((), "only null: this server gives text"),
    "web_search_options": ((), "only null"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "guided_json": ((), "use response_format"),
    "guided_regex": ((), "use response_format with a JSON schema"),
    "guided_choice": ((), "use response_format with a JSON schema"),
    "guided_grammar": ((), "use response_format with a JSON schema"),
    "structured_outputs": ((), "use response_format"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "truncate_prompt_tokens": ((), "only null: shorten the prompt"),
    "chat_template": ((), "only the model's own; see chat_template_kwargs"),
    "prompt_embeds": ((), "use prompt"),
}

# Fields of OpenAI's API that say nothing about the answer.
HARMLESS = frozenset(
    ("user", "store", "metadata", "service_tier", "prediction", "reasoning_effort", "verbosity", "prompt_cache_key")
    + ("prompt_cache_retention", "safety_identifier", "priority", "request_id")
)

# Fields whose names and meaning are the same in a body and in SamplingParams.
SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
) + ("seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "max_draft_depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """One body, understood: the requests to run and what the answer must look like."""

    requests: list[Request]
    tool_names: tuple[str, ...] = ()
    """Calls of these are read out of the text."""
    named_tool: str | None = None
    """The whole text is this tool's arguments."""


def completion_intake(body: CompletionBody, tokenizer: Tokenizer, max_model_len: int) -> Intake:
    """One request per prompt, of less than `max_model_len` tokens each. Raises RequestError."""
    check_extras(body)
    prompts = _prompts(body, tokenizer, max_model_len)
    params = _params(body, max_tokens=16 if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs)
    base, schema = f"cmpl-{uuid4().hex}", _answer_schema(body)
    return Intake(
        requests=[
            Request(
                request_id=f"{base}-{i}",
                prompt_token_ids=tuple(ids),
                params=params,
                json_schema=schema,
                cache_salt=body.cache_salt,
            )
            for i, ids in enumerate(prompts)
        ]
    )


def _prompts(body: CompletionBody, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        listed: list[object] = [prompt]
    else:
        listed = [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)
    if not 1 <= len(listed) <= MAX_PROMPTS:
        raise RequestError("prompt", f"{len(listed)} prompts", f"1 to {MAX_PROMPTS} prompts")
    special = body.add_special_tokens
    return [
        _encoded(p, tokenizer, max_model_len, special=special) if isinstance(p, str) else cast(list[int], p)
        for p in listed
    ]


def _encoded(text: str, tokenizer: Tokenizer, max_model_len: int, *, special: bool) -> list[int]:
    """Token ids; a text that cannot fit is refused before seconds are spent on reading it."""
    if tokenizer.fewest_tokens(text) >= max_model_len:
        raise CapacityError(
            "prompt", f"{len(text)} characters", f"at most {max_model_len - 1} tokens (max_model_len {max_model_len})"
        )
    return tokenizer.encode(whole_characters(text), add_special_tokens=special)


def chat_intake(body: ChatBody, tokenizer: Tokenizer, max_model_len: int) -> Intake:
    """The request of one conversation of less than `max_model_len` tokens. Raises RequestError."""
    check_extras(body)
    names, schema = _tool_plan(body)
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = _encoded(_render(body, tokenizer), tokenizer, max_model_len, special=False)
    request = Request(
        request_id=f"chatcmpl-{uuid4().hex}",
        prompt_token_ids=tuple(prompt),
        params=_renamed(body, max_tokens=limit, logprobs=_chat_logprobs(body)),
        json_schema=schema,
        cache_salt=body.cache_salt,
    )
    return Intake(requests=[request], tool_names=() if named else names, named_tool=named)


def _renamed(body: ChatBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; an error names the field the client wrote."""
    try:
        return _params(body, max_tokens=max_tokens, logprobs=logprobs)
    except RequestError as error:
        written = {"max_tokens": "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"}
        written["logprobs"] = "top_logprobs"
        raise RequestError(written.get(error.field, error.field), error.value, error.allowed) from None


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", body.top_logprobs, "it needs logprobs=true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _render(body: ChatBody, tokenizer: Tokenizer) -> str:
    template = tokenizer.template
    if template is None:
        raise RequestError("messages", "a conversation", "this model has no chat template: use /v1/completions")
    messages = cast(list[dict[str, object]], body.messages)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or [] if body.tool_choice != "none"]
    if tools and not template.reads_tools:
        messages, tools = with_tools_inline(check_messages(messages), tools), []
    return template.render(
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )


def _tool_plan(body: ChatBody) -> tuple[tuple[str, ...], str | None]:
    """Names of the tools to look for in the answer, and the JSON schema that holds the answer."""
    choice, functions = body.tool_choice, [t.function.model_dump(exclude_unset=True) for t in body.tools or []]
    names = tuple(str(function["name"]) for function in functions)
    if choice not in (None, "none") and not names:
        raise RequestError("tool_choice", _choice_text(body), "it needs tools")
    answer = _answer_schema(body)
    if choice == "none" or not names:
        return (), answer
    if answer is not None:
        raise RequestError("response_format", "a JSON schema", "not together with tools; set tool_choice to none")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise RequestError("tool_choice", choice.function.name, f"one of the tools: {', '.join(names)}")
        return names, json.dumps(parameters_of(functions[names.index(choice.function.name)]))
    if choice == "required":
        max_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
        return names, json.dumps(calls_schema(functions, max_calls=max_calls))
    return names, None


def _choice_text(body: ChatBody) -> str:
    return body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else str(body.tool_choice)


def _answer_schema(body: Body) -> str | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return "{}"
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise RequestError("response_format", "json_schema", "a schema in response_format.json_schema.schema")
    return json.dumps(asked.json_schema.schema_)


def _params(body: Body, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; null means the default, as in OpenAI's API."""
    for name in ("top_k", "min_tokens", "max_draft_depth"):
        value = getattr(body, name)
        if value is not None and value > MAX_INT:
            raise RequestError(name, value, f"at most {MAX_INT}")
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAMES if getattr(body, name) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id; JSON has only strings as keys."""
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError("logit_bias", _shortened(key), "token ids as keys")
    return {int(token_id): bias for token_id, bias in given.items()}


def whole_characters(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_extras(body: Body) -> None:
    """RequestError for fields that are not supported and would change the answer; others are ignored."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options", "given", "only with stream=true")
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED:
            usual, allowed = UNSUPPORTED[name]
            if value is not None and value not in usual:
                raise RequestError(name, _shortened(value), allowed)
        elif name not in HARMLESS:
            log.info("ignoring the unknown field %s", _shortened(name))


def _shortened(value: object) -> object:
    return value if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
