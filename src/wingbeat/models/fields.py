"""Typed reading of config.json: every wrong value becomes a CheckpointError naming file, field, value and what fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from wingbeat.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and where it came from. A null value counts as absent."""

    values: Mapping[str, object]
    origin: str

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refusal(self, name: str, allowed: str) -> CheckpointError:
        """The error to raise for one field."""
        return CheckpointError(f"{self.origin}: {name}={self.values.get(name)!r} is not supported: {allowed}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(name, f"expected an integer >= {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(name, "expected a number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(name, "expected true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.refusal(name, "expected a string")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of non-negative integers (a single one counts as a list of one); None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        items: list[object] = cast(list[object], value) if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
            raise self.refusal(name, "expected integers >= 0")
        return tuple(cast(list[int], items))

    def section(self, name: str) -> Fields | None:
        """The nested object `name`, or None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(name, "expected an object")
        return Fields(cast(dict[str, object], value), f"{self.origin}: {name}")


def read_json(path: Path) -> Fields:
    """The JSON object in a file; CheckpointError when it is missing, unreadable or not an object."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a model directory holds a {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return Fields(cast(dict[str, object], value), str(path))
