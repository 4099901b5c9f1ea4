"""The exception tree.

WingbeatError
|-- ConfigError        a setting is wrong: names field, value and what is allowed   (exit 2)
|-- CheckpointError    a model directory or file cannot be used: names tensor or field
|-- RequestError       one request is wrong: names the field                        (HTTP 4xx)
|   `-- CapacityError  the request can never fit
|-- EngineError        the engine failed while serving                              (HTTP 5xx)
`-- LabError           a benchmark, suite, record or comparison cannot be used
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WingbeatError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(WingbeatError):
    """A setting is wrong; the message names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not valid: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class CheckpointError(WingbeatError):
    """A checkpoint cannot be used; the message names the file, tensor or field and the reason."""


class RequestError(WingbeatError):
    """One request is wrong; the server answers 400 with `param` set to the field."""

    status = 400

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not valid: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class CapacityError(RequestError):
    """A request that can never fit: its prompt is longer than the context."""


class EngineError(WingbeatError):
    """The engine failed while serving; requests in the step are failed, never lost."""


class LabError(WingbeatError):
    """A benchmark, suite, record or comparison cannot be used; the message says which and why."""


def unknown_name(field: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """ConfigError for a name outside `allowed`, with the nearest one as a hint."""
    names = sorted(allowed)
    near = get_close_matches(value, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ConfigError(field, value, f"expected one of {', '.join(names)}{hint}")
