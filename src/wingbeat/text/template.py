"""ChatTemplate: messages to prompt text, by the model's own Jinja template in a sandbox.

A template is code from a checkpoint: it sees only what is passed in, cannot reach Python, and its failures come back as
RequestErrors. Whitespace rules and the names a template may call follow transformers, for which templates are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wingbeat.errors import CheckpointError, RequestError

JsonObject = dict[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000


class ChatTemplate:
    """One model's chat template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """`tool_source` is a second template some models bring for requests with tools."""
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tool_source or source)
        except TemplateError as error:
            raise CheckpointError(f"chat_template: line {_line(error)}: {error}") from None
        self.reads_tools = "tools" in (tool_source or source)
        """False: the template would drop a request's tools without a word."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. RequestError naming `messages[i].field` for messages the template cannot take.

        continue_final_message leaves the last (assistant) message open, to be continued; `variables` are extra names
        the template may read (vLLM's chat_template_kwargs).
        """
        checked = check_messages(messages)
        if continue_final_message:
            _check_continuation(checked, add_generation_prompt)
        text = self._render(checked, tools, add_generation_prompt, variables or {})
        return _cut_after(text, str(checked[-1]["content"])) if continue_final_message else text

    def _render(
        self,
        messages: list[JsonObject],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        template = self._with_tools if tools else self._plain
        names: JsonObject = {**self._special_tokens, **variables, "messages": messages}
        names |= {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(names)
        except _RefusedError as error:
            raise RequestError("messages", _roles(messages), f"the chat template refuses them: {error}") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError("messages", _roles(messages), f"the chat template cannot render them: {error}") from None


class _RefusedError(Exception):
    """A template called raise_exception."""


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}, which marks assistant text for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the interface Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[JsonObject]:
    """Messages with text content and parsed tool arguments, as templates expect them. RequestError names the field."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise RequestError("messages", f"{len(messages)} messages", f"expected 1 to {MAX_MESSAGES} messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Mapping[str, object], where: str) -> JsonObject:
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role", role, f"expected one of {', '.join(ROLES)}")
    checked: JsonObject = {name: value for name, value in message.items() if value is not None}
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _check_tool_calls(calls, f"{where}.tool_calls")
    # Content may be left out only where there is something else to say.
    if message.get("content") is None and not (role == "assistant" and calls):
        raise RequestError(f"{where}.content", None, "expected a string or a list of text parts")
    checked["content"] = _content_text(message.get("content"), f"{where}.content")
    return checked


def _content_text(content: object, where: str) -> str:
    """The text of a message; parts are joined by newlines, as vLLM does for templates that take strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, content, "expected a string or a list of text parts")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(cast(list[object], content)))


def _part_text(part: object, where: str) -> str:
    fields = cast(JsonObject, part) if isinstance(part, dict) else {}
    kind, text = fields.get("type"), fields.get("text")
    if kind != "text":
        raise RequestError(f"{where}.type", kind, "only 'text' parts are supported")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text", text, "expected a string")
    return text


def _check_tool_calls(calls: object, where: str) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise RequestError(where, calls, "expected a list of tool calls")
    return [_check_tool_call(call, f"{where}[{index}]") for index, call in enumerate(cast(list[object], calls))]


def _check_tool_call(call: object, where: str) -> JsonObject:
    """Arguments arrive as JSON text (OpenAI); templates print them as an object."""
    fields = dict(cast(JsonObject, call)) if isinstance(call, dict) else {}
    function = fields.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name", None, "expected a string")
    arguments = cast(JsonObject, function).get("arguments")
    if isinstance(arguments, str):
        try:
            parsed: object = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise RequestError(f"{where}.function.arguments", arguments, f"expected JSON: {error}") from None
        fields["function"] = {**cast(JsonObject, function), "arguments": parsed}
    return fields


def _check_continuation(messages: list[JsonObject], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError("continue_final_message", True, "expected add_generation_prompt=false with it")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise RequestError(
            "continue_final_message", True, "expected the last message to be an assistant's, with content"
        )


def _cut_after(text: str, content: str) -> str:
    """The rendered text up to the end of the last message's content (templates may strip it)."""
    for wanted in (content, content.strip()):
        at = text.rfind(wanted)
        if at >= 0:
            return text[: at + len(wanted)]
    raise RequestError("continue_final_message", True, "the chat template does not show the final message as it is")


def _roles(messages: list[JsonObject]) -> str:
    return ", ".join(str(message["role"]) for message in messages[:20])


def _line(error: TemplateError) -> int:
    return cast(int, getattr(error, "lineno", 0))


def read_template(
    directory: Path, tokenizer_config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The chat template of a model directory (chat_template.jinja, else tokenizer_config.json); None without one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
    found = tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return ChatTemplate(found, special_tokens)
    if isinstance(found, list):
        named = {str(item.get("name")): str(item.get("template")) for item in found if isinstance(item, dict)}
        if "default" in named:
            return ChatTemplate(named["default"], special_tokens, tool_source=named.get("tool_use"))
    return None
