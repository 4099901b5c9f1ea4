from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro

from wingbeat.config import as_flags, describe, field_names, read_settings, split_config_flag, trace_origins
from wingbeat.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    max_num_seqs: int = 3
    prefix: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    engine: Inner = Inner()
    stop: tuple[str, ...] = ()
    bias: float = 0.5
    api_key: str | None = None


def write(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text)
    return file


def parse(file: Path, flags: list[str]) -> Outer:
    settings = read_settings(file, Outer)
    return tyro.cli(Outer, args=as_flags(settings) + flags, config=(tyro.conf.OmitArgPrefixes,))


def test_file_sets_nested_fields_and_flags_override_it(tmp_path: Path) -> None:
    file = write(tmp_path, 'stop = ["a", "b"]\nbias = -1.5\n[engine]\nmax-num-seqs = 8\nprefix = false\n')
    assert parse(file, []) == Outer(engine=Inner(max_num_seqs=8, prefix=False), stop=("a", "b"), bias=-1.5)
    assert parse(file, ["--max-num-seqs", "4", "--prefix"]).engine == Inner(max_num_seqs=4, prefix=True)


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq'.*did you mean 'max_num_seqs'"):
        read_settings(write(tmp_path, "max_num_seq = 8\n"), Outer)


@pytest.mark.parametrize("text", ["x = = 1", "max_num_seqs = 1\n[engine]\nmax_num_seqs = 2\n"])
def test_bad_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read_settings(write(tmp_path, text), Outer)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_settings(tmp_path / "absent.toml", Outer)


def test_config_flag_is_taken_out_of_the_arguments() -> None:
    assert split_config_flag(["--a", "1", "--config", "x.toml", "--b"]) == (Path("x.toml"), ["--a", "1", "--b"])
    assert split_config_flag(["--config=x.toml"]) == (Path("x.toml"), [])
    assert split_config_flag(["--a"]) == (None, ["--a"])
    with pytest.raises(ConfigError):
        split_config_flag(["--config"])


def test_every_setting_has_an_origin_and_keys_stay_secret() -> None:
    config = Outer(engine=Inner(max_num_seqs=4, prefix=False), bias=2.0, api_key="hush")
    settings = trace_origins(config, {"bias", "max_num_seqs"}, ["--max-num-seqs=4", "--no-prefix", "--api-key", "hush"])
    origins = {s.name: s.origin for s in settings}
    assert origins == {
        "max_num_seqs": "flag",
        "prefix": "flag",
        "stop": "default",
        "bias": "file",
        "api_key": "flag",
    }
    assert list(origins) == field_names(Outer)
    text = describe(settings)
    assert "hush" not in text
    assert text.index("max_num_seqs") < text.index("bias") < text.index("stop")
