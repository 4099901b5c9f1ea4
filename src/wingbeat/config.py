"""Settings from a TOML file and from flags, and where each one came from.

A command is a frozen dataclass, possibly holding others (a server holds an EngineConfig). Flags are flat:
`--max-num-seqs` sets the field `max_num_seqs` wherever it lives. A file has the same keys, flat or in tables;
its values become flags placed before the user's own, so one parser checks both and a later flag wins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from wingbeat.errors import ConfigError, unknown_name

Origin = Literal["default", "file", "flag"]
Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it came from."""

    name: str
    value: object
    origin: Origin


def split_config_flag(argv: list[str]) -> tuple[Path | None, list[str]]:
    """The path after `--config` (or None) and the arguments without it."""
    for i, argument in enumerate(argv):
        if argument == "--":
            break
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config=")), argv[:i] + argv[i + 1 :]
        if argument == "--config":
            if i + 1 == len(argv):
                raise ConfigError("config", "", "the path of a TOML file")
            return Path(argv[i + 1]), argv[:i] + argv[i + 2 :]
    return None, argv


def read_settings(path: Path, cls: type) -> dict[str, Scalar | list[Scalar]]:
    """Field name -> value as the file gives it. Raises ConfigError for a bad file, an unknown or a repeated key."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config", str(path), f"a readable TOML file ({error})") from None
    known = field_names(cls)
    settings: dict[str, Scalar | list[Scalar]] = {}
    for key, value in _flat(content):
        name = key.replace("-", "_")
        if name not in known:
            raise unknown_name(f"key in {path}", key, known)
        if name in settings:
            raise ConfigError(key, value, f"given once in {path}")
        settings[name] = value
    return settings


def _flat(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaf keys and values; the names of tables only group them."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def field_names(cls: type) -> list[str]:
    """Names of all leaf fields of a dataclass and of the dataclasses inside it."""
    names: list[str] = []
    hints = get_type_hints(cls)
    for field in fields(cls):
        inner = hints[field.name]
        names.extend(field_names(inner) if isinstance(inner, type) and is_dataclass(inner) else [field.name])
    return names


def as_flags(settings: dict[str, Scalar | list[Scalar]]) -> list[str]:
    """The command-line spelling of file settings."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags.extend([f"--{flag}", *map(str, value)])
        else:
            # One word, so that a value that begins with "-" is not read as a flag.
            flags.append(f"--{flag}={value}")
    return flags


def trace_origins(config: object, file_names: set[str], argv: list[str]) -> list[Setting]:
    """Every leaf setting of a parsed config with its origin; a flag on the command line outranks the file."""
    words = {a.split("=", 1)[0].lstrip("-").replace("-", "_") for a in argv if a.startswith("--")}
    flags = words | {word.removeprefix("no_") for word in words}
    return [
        Setting(n, v, "flag" if n in flags else "file" if n in file_names else "default") for n, v in _leaves(config)
    ]


def _leaves(config: object) -> Iterator[tuple[str, object]]:
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value)
        else:
            yield field.name, value


def describe(settings: list[Setting]) -> str:
    """One line per setting, the chosen ones first: `max_num_seqs = 8  (flag)`."""
    ordered = sorted(settings, key=lambda s: ("flag", "file", "default").index(s.origin))
    width = max((len(s.name) for s in ordered), default=0)
    return "\n".join(f"  {s.name:<{width}} = {_shown(s)}  ({s.origin})" for s in ordered)


def _shown(setting: Setting) -> str:
    secret = "api_key" in setting.name and setting.value
    return "***" if secret else repr(setting.value)
