"""Everything that can be wrong with a checkpoint is refused before allocation, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wingbeat.errors import CheckpointError
from wingbeat.models.checkpoint import Checkpoint, file_digest
from wingbeat.models.fields import Fields

SHAPES = {"a": (2, 3), "b": (4,)}


def save(directory: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    save_file({name: torch.ones(shape) for name, shape in (shapes or SHAPES).items()}, directory / "model.safetensors")
    return directory


def test_reads_and_converts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path))
    checkpoint.check(SHAPES)
    assert torch.equal(
        checkpoint.read("a", torch.bfloat16, torch.device("cpu")), torch.ones(2, 3, dtype=torch.bfloat16)
    )
    assert checkpoint.read("b", None, torch.device("cpu")).dtype == torch.float32


def test_missing_unmatched_and_misshaped_are_all_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, {"a": (3, 2), "stray": (1,)}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(SHAPES)
    assert "missing: b;" in str(caught.value)
    assert "not part of the model: stray;" in str(caught.value)
    assert "a has shape [3, 2], expected [2, 3]" in str(caught.value)


def test_long_lists_are_counted(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path))
    expected: dict[str, tuple[int, ...]] = {f"t{i}": (1,) for i in range(9)}
    with pytest.raises(CheckpointError, match=r"missing: t0, t1, t2, t3, t4 and 4 more"):
        checkpoint.check({**SHAPES, **expected})


def test_rotary_buffers_and_listed_names_may_be_there(tmp_path: Path) -> None:
    extra: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,), "tied": (1,)}
    Checkpoint.open(save(tmp_path, {**SHAPES, **extra})).check(SHAPES, ["tied"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def not_json(path: Path) -> None:
    path.write_bytes((8).to_bytes(8, "little") + b"[1, 2, 3")


def wrong_range(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def odd_dtype(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated"),
        (cut_the_header, "truncated"),
        (empty, "truncated"),
        (not_json, "broken safetensors header"),
        (wrong_range, "tensor a of shape \\[4\\] F32 does not fill"),
        (odd_dtype, "tensor a has dtype F8_E4M3"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(save(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_directories_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* safe_serialization"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        Checkpoint.open(tmp_path)


def test_digest_follows_weights_and_config(tmp_path: Path) -> None:
    fields = Fields({"hidden_size": 3}, "config.json")
    first = Checkpoint.open(save(tmp_path)).digest(fields)
    assert first == Checkpoint.open(save(tmp_path)).digest(Fields({"hidden_size": 3}, "elsewhere"))
    assert first != Checkpoint.open(tmp_path).digest(Fields({"hidden_size": 4}, "config.json"))
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert first != Checkpoint.open(tmp_path).digest(fields)


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FULL_HASH_BYTES", 50), ("SAMPLE_BYTES", 10), ("SAMPLE_STRIDE", 40)):
        monkeypatch.setattr(f"wingbeat.models.checkpoint.{name}", value)
    path, data = tmp_path / "large", bytearray(100)

    def digest_with(position: int) -> str:
        changed = bytearray(data)
        changed[position] = 1
        path.write_bytes(changed)
        return file_digest(path)

    path.write_bytes(data)
    whole = file_digest(path)
    assert whole != digest_with(5)
    assert whole != digest_with(85)
    assert whole == digest_with(20)
    path.write_bytes(data + b"\0")
    assert whole != file_digest(path)
