"""Checkpoint: the tensors of a safetensors directory - names and shapes first, bytes on demand.

Headers are validated before anything is allocated, so a truncated download or a checkpoint of another model is refused
with its reason in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wingbeat.errors import CheckpointError
from wingbeat.models.fields import Fields, read_json

FULL_HASH_BYTES = 1 << 30
SAMPLE_BYTES, SAMPLE_STRIDE = 1 << 20, 1 << 26
MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """All tensors of one directory."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        self.directory = directory
        self.entries = entries

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """Reads the headers of model.safetensors or of the shards the index lists."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such model directory")
        entries: dict[str, TensorEntry] = {}
        for file in _tensor_files(directory):
            entries.update(_read_header(file))
        return Checkpoint(directory, entries)

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """One tensor, converted; its own dtype when `dtype` is None."""
        try:
            with safe_open(self.entries[name].file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.entries[name].file}: tensor {name} cannot be read: {error}") from None
        return tensor.to(device=device, dtype=dtype or tensor.dtype)

    def check(self, expected: Mapping[str, tuple[int, ...]], ignorable: Iterable[str] = ()) -> None:
        """CheckpointError naming the missing, unmatched and wrongly shaped tensors (up to 5 of each)."""
        known = set(expected) | set(ignorable)
        missing = [name for name in expected if name not in self.entries]
        unmatched = [name for name in sorted(self.entries) if name not in known and not _is_rotary_buffer(name)]
        reshaped = [
            f"{name} has shape {list(self.entries[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in self.entries and self.entries[name].shape != shape
        ]
        parts = [("missing", missing), ("not part of the model", unmatched), ("wrong shape", reshaped)]
        problems = [f"{title}: {_first(names)}" for title, names in parts if names]
        if problems:
            raise CheckpointError(f"{self.directory}: tensors do not fit the config; {'; '.join(problems)}")

    def digest(self, fields: Fields) -> str:
        """First 16 hex digits of sha256 over config.json's content and the tensor files.

        Files up to 1 GiB are hashed whole; of larger ones the size, the first 1 MiB (the header) and then 1 MiB every
        64 MiB (1.6 % of the bytes), which tells fine-tunes apart without reading a 16 GB model twice.
        """
        whole = hashlib.sha256(json.dumps(fields.values, sort_keys=True).encode())
        for file in sorted({entry.file for entry in self.entries.values()}):
            whole.update(file_digest(file).encode())
        return whole.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """sha256 of a file, sampled above FULL_HASH_BYTES (see Checkpoint.digest)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= FULL_HASH_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for start in range(0, size, SAMPLE_STRIDE):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _tensor_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(_nothing_to_load(directory))
    names = read_json(index).section("weight_map")
    if names is None:
        raise CheckpointError(f"{index}: weight_map is missing")
    files = sorted({directory / str(name) for name in names.values.values()})
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: shard listed in {index.name} is missing")
    return files


def _nothing_to_load(directory: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if not pickles:
        return f"{directory}: no model.safetensors or model.safetensors.index.json in this directory"
    hint = "convert it with transformers: save_pretrained(..., safe_serialization=True)"
    return f"{directory}: holds {pickles[0]} but no safetensors; pickled weights are not loaded, {hint}"


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, shapes and dtypes in one file, its byte ranges checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file, or truncated ({size} bytes)")
        text = file.read(header_bytes)
    try:
        header = json.loads(text)
        entries = {name: _entry(path, name, item) for name, item in header.items() if name != "__metadata__"}
        ends = [int(header[name]["data_offsets"][1]) for name in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken safetensors header: {error!r}") from None
    needed = 8 + header_bytes + max(ends, default=0)
    if needed > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes where its header needs {needed}")
    return entries


def _entry(path: Path, name: str, item: Mapping[str, list[int]]) -> TensorEntry:
    dtype, shape, (start, end) = str(item["dtype"]), tuple(item["shape"]), item["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(DTYPE_BYTES)}")
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(f"{path}: tensor {name} of shape {list(shape)} {dtype} does not fill its byte range")
    return TensorEntry(path, shape, dtype)


def _is_rotary_buffer(name: str) -> bool:
    """Old exports saved RoPE's frequencies; they follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _first(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
