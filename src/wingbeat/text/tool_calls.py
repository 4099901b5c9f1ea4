"""Tool calls: told to models whose template has no place for tools, and read back from what a model writes.

Three spellings are understood: `<tool_call>{...}</tool_call>` (Hermes, Qwen), a bare JSON object and a bare JSON array
of objects, each with a `name` and `arguments` (or `parameters`). Bare JSON counts only when it names a tool on offer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

JsonObject = dict[str, object]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text, as clients expect it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """Plain text and finished calls, in the order the model wrote them within each."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class ToolCallReader:
    """Splits one choice's text into plain text and calls as it streams. What may become a call is held back."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        self._names = frozenset(tool_names)
        self._held = ""
        self._anything_out = False

    def feed(self, text: str) -> Parsed:
        """Text that is certainly no call, and calls that are complete."""
        self._held += text
        out, calls = "", []
        while not self._may_be_bare():
            before, marker, rest = self._held.partition(OPEN)
            if not marker:
                keep = _overlap(self._held, OPEN)
                cut = len(self._held) - keep
                out, self._held = out + self._held[:cut], self._held[cut:]
                break
            body, closing, after = rest.partition(CLOSE)
            if not closing:
                out, self._held = out + before, marker + rest
                break
            read = read_calls(body)
            out, self._held = out + before + ("" if read else marker + body + closing), after
            calls.extend(read)
            self._anything_out = True
        self._anything_out |= bool(out.strip())
        return Parsed(out, tuple(calls))

    def finish(self) -> Parsed:
        """The rest, once the choice has ended."""
        rest, self._held = self._held, ""
        if rest.startswith(OPEN):
            calls = read_calls(rest.removeprefix(OPEN))  # the end token may stand in for the closing marker
        else:
            calls = [] if self._anything_out else read_calls(_without_fence(rest))
            calls = calls if all(call.name in self._names for call in calls) else []
        return Parsed("", tuple(calls)) if calls else Parsed(rest)

    def _may_be_bare(self) -> bool:
        """True while all the text so far could be the start of a JSON object or array (or a fence around one)."""
        start = self._held.lstrip()
        return not self._anything_out and (not start or start[0] in "{[" or start.startswith("```"[: len(start)]))


def read_calls(text: str) -> list[ToolCall]:
    """The calls in one JSON value; none if it is not JSON, or any part of it is not a call."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return []
    items = cast(list[object], value) if isinstance(value, list) else [value]
    calls = [_call_of(item) for item in items]
    return [call for call in calls if call is not None] if None not in calls else []


def _call_of(item: object) -> ToolCall | None:
    fields = cast(JsonObject, item) if isinstance(item, dict) else {}
    if isinstance(fields.get("function"), dict):
        fields = cast(JsonObject, fields["function"])
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _without_fence(text: str) -> str:
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.split("\n", 1)[1].removesuffix("```")
    return text


def _overlap(text: str, marker: str) -> int:
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def calls_schema(tools: Sequence[Mapping[str, object]], *, max_calls: int = MAX_CALLS) -> JsonObject:
    """JSON schema of an array with at least one call to these functions (tool_choice "required")."""
    definitions: JsonObject = {}
    options = [_one_call_schema(tool, definitions) for tool in tools]
    schema: JsonObject = {"type": "array", "minItems": 1, "maxItems": max_calls, "items": {"anyOf": options}}
    return schema | ({"$defs": definitions} if definitions else {})


def _one_call_schema(tool: Mapping[str, object], definitions: JsonObject) -> JsonObject:
    parameters = dict(parameters_of(tool))
    # References are written from the root of the tool's own schema, so its definitions move to the new root.
    if isinstance(parameters.get("$defs"), dict):
        definitions.update(cast(JsonObject, parameters.pop("$defs")))
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def parameters_of(tool: Mapping[str, object]) -> JsonObject:
    """The schema of a function's arguments; any object where it gives none."""
    return cast(JsonObject, tool.get("parameters") or {"type": "object"})


def tools_message(tools: Sequence[Mapping[str, object]]) -> str:
    """A system message that offers tools (whole `{"type": "function", ...}` records) where the template cannot."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call the functions below. Their signatures are JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with nothing but a JSON object between tool_call tags, as in\n"
        f'{OPEN}{{"name": "function name", "arguments": {{"argument": "value"}}}}{CLOSE}'
    )


def with_tools_inline(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[JsonObject]:
    """Messages that say in plain text what a template without tools would drop: the offer, calls and their results."""
    inlined = [_inline(message) for message in messages]
    offer = tools_message(tools)
    if inlined and inlined[0].get("role") == "system" and isinstance(inlined[0].get("content"), str):
        return [{**inlined[0], "content": f"{inlined[0]['content']}\n\n{offer}"}, *inlined[1:]]
    return [{"role": "system", "content": offer}, *inlined]


def _inline(message: Mapping[str, object]) -> JsonObject:
    role, calls = message.get("role"), message.get("tool_calls")
    if role == "tool" and isinstance(message.get("content"), str):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if role != "assistant" or not isinstance(calls, list):
        return dict(message)
    said = message.get("content")
    lines = [said] if isinstance(said, str) and said else []
    lines += [f"{OPEN}{_call_text(call)}{CLOSE}" for call in cast(list[object], calls)]
    return {"role": "assistant", "content": "\n".join(lines)}


def _call_text(call: object) -> str:
    function = cast(JsonObject, call).get("function") if isinstance(call, dict) else None
    fields = cast(JsonObject, function) if isinstance(function, dict) else {}
    arguments = fields.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(fields.get("name"))}, "arguments": {text or "{}"}}}'
