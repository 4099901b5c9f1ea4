"""Loads a suite by name (shipped) or path (any JSONL with the same keys)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from wingbeat.errors import LabError, unknown_name

DATA = Path(__file__).parent / "data"
SHIPPED = ("coding", "agentic", "encyclopedic")
SHIPPED_VERSION = "1"


class Prompt(BaseModel):
    """One conversation to complete; `tools` are offered in OpenAI's form."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(min_length=1)
    domain: str = "user"
    kind: str = ""
    messages: list[dict[str, JsonValue]] = Field(min_length=1)
    tools: list[dict[str, JsonValue]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Ordered prompts; `digest` is the sha256 over all of them, in order."""

    name: str
    version: str
    provenance: str
    prompts: tuple[Prompt, ...]
    digest: str

    @property
    def identity(self) -> str:
        return f"{self.name}@{self.version}:{self.digest[:16]}"


def load_suite(name_or_path: str) -> Suite:
    """The shipped suite of that name, or the JSONL file at that path."""
    path = Path(name_or_path)
    if name_or_path in SHIPPED:
        return _read(name_or_path, SHIPPED_VERSION, "shipped with wingbeat", DATA / f"{name_or_path}.jsonl")
    if path.suffix == ".jsonl" or path.is_file():
        return _read(path.stem, "file", f"file {path.name}", path)
    raise unknown_name("suite", name_or_path, [*SHIPPED, "PATH.jsonl"])


def _read(name: str, version: str, provenance: str, path: Path) -> Suite:
    if not path.is_file():
        raise LabError(f"suite {name!r}: {path} does not exist")
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = tuple(_prompt(path, n, line) for n, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise LabError(f"suite {name!r}: {path} holds no prompts")
    _refuse_duplicates(path, prompts)
    return Suite(name=name, version=version, provenance=provenance, prompts=prompts, digest=digest(prompts))


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        return Prompt.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        raise LabError(f"{path}:{number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _refuse_duplicates(path: Path, prompts: tuple[Prompt, ...]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise LabError(f"{path}: prompt id {prompt.id!r} appears twice")
        seen.add(prompt.id)


def digest(prompts: tuple[Prompt, ...]) -> str:
    """sha256 over ids, messages and tools in order; one changed character or a swapped pair changes it."""
    hasher = hashlib.sha256()
    for p in prompts:
        hasher.update(json.dumps([p.id, p.messages, p.tools], sort_keys=True, ensure_ascii=True).encode())
        hasher.update(b"\n")
    return hasher.hexdigest()
