"""Run directories: append-only while a run lasts, renamed into place when it finishes.

A run writes into `.<run_id>.partial/`; finishing renames that to `<run_id>/`. A crash therefore leaves a partial
directory with every finished request in it and nothing that looks complete; `read_run` reads both and says which it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import ValidationError

from wingbeat.errors import LabError
from wingbeat.lab.record import FORMAT_VERSION, BlockRecord, Record, RequestRecord, RunRecord

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read back: everything that finished before it ended or crashed."""

    path: Path
    record: RunRecord
    requests: tuple[RequestRecord, ...]
    blocks: tuple[BlockRecord, ...]

    @property
    def complete(self) -> bool:
        return self.record.status == "finished"


class RunWriter:
    """Owns the files of one run in progress."""

    def __init__(self, root: Path, record: RunRecord) -> None:
        self.record = record
        self._final = root / record.run_id
        self._partial = root / f".{record.run_id}.partial"
        if self._final.exists() or self._partial.exists():
            raise LabError(f"run {record.run_id!r} exists already under {root}: choose another --label or --out")
        self._partial.mkdir(parents=True)
        self._requests = (self._partial / "requests.jsonl").open("a", encoding="utf-8")
        self._blocks = (self._partial / "blocks.jsonl").open("a", encoding="utf-8")
        self._write_run()

    def add_request(self, record: RequestRecord) -> None:
        _append(self._requests, record)

    def add_block(self, record: BlockRecord) -> None:
        """Appends a block; requests of the block are forced to disk with it."""
        _append(self._blocks, record)
        os.fsync(self._requests.fileno())
        os.fsync(self._blocks.fileno())

    def finish(self, status: str, notes: tuple[str, ...] = ()) -> Path:
        """Closes the files and renames the directory into place; the value is its final path."""
        self.record = self.record.model_copy(
            update={"status": status, "finished_at": now(), "notes": self.record.notes + notes}
        )
        self._requests.close()
        self._blocks.close()
        self._write_run()
        os.rename(self._partial, self._final)
        return self._final

    def _write_run(self) -> None:
        """run.json is replaced whole: a reader sees the old or the new one, never half."""
        draft = self._partial / "run.json.tmp"
        draft.write_text(self.record.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(draft, self._partial / "run.json")


def _append(file: TextIO, record: Record) -> None:
    file.write(record.model_dump_json(exclude_defaults=True) + "\n")
    file.flush()


def now() -> str:
    """UTC wall time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id(kind: str, label: str) -> str:
    """Sortable and readable: 20261201-153000-parallel-label-pid."""
    clean = "".join(c if c.isalnum() or c in "._" else "-" for c in label)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return "-".join(part for part in (stamp, kind, clean, str(os.getpid())) if part)


def read_run(path: Path) -> Run:
    """A run directory, finished or partial. A torn last line (a crash while writing) is dropped."""
    head = path / "run.json"
    if not head.is_file():
        raise LabError(f"{path} is not a run directory: it has no run.json")
    record = _parse(RunRecord, head.read_text(encoding="utf-8"), head)
    if record.format_version > FORMAT_VERSION:
        raise LabError(f"{head}: format_version={record.format_version} is newer than this reader ({FORMAT_VERSION})")
    return Run(
        path=path,
        record=record,
        requests=tuple(_read_lines(RequestRecord, path / "requests.jsonl")),
        blocks=tuple(_read_lines(BlockRecord, path / "blocks.jsonl")),
    )


def list_runs(root: Path) -> list[RunRecord]:
    """Every run under `root`, oldest first; rebuilt from the directories, so nothing can go out of date."""
    heads = sorted([*root.glob("*/run.json"), *root.glob(".*.partial/run.json")])
    records = {_parse(RunRecord, head.read_text(encoding="utf-8"), head).run_id: head for head in heads}
    return [_parse(RunRecord, head.read_text(encoding="utf-8"), head) for _, head in sorted(records.items())]


def _read_lines(kind: type[R], path: Path) -> Iterator[R]:
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    # The last piece is empty after a complete line; anything else there is a line the crash cut short.
    for line in lines[:-1]:
        yield _parse(kind, line, path)


def _parse(kind: type[R], text: str, path: Path) -> R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "(whole)"
        raise LabError(f"{path}: {where}: {first['msg']}") from None
