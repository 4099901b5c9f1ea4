"""wingbeat serve: its flags, and what it refuses before anything is served."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from wingbeat.cli.main import main
from wingbeat.cli.serve import Serve, listen
from wingbeat.errors import ConfigError


def parsed(*flags: str) -> Serve:
    return tyro.cli(Serve, args=list(flags), config=(tyro.conf.OmitArgPrefixes,))


def test_defaults_listen_on_this_machine_only() -> None:
    config = parsed()
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", 8000, ())
    assert config.engine_config.model == "smollm2"


def test_names_of_flags_are_vllms() -> None:
    config = parsed(
        *("some/model", "--host", "0.0.0.0", "--port", "9", "--api-key", "a", "b", "--served-model-name", "m"),
        *("--max-model-len", "128", "--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--dtype", "float32"),
        *("--block-size", "8", "--num-gpu-blocks-override", "50", "--no-enable-prefix-caching", "--seed", "4"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1000", "--load-format", "dummy"),
        *("--speculative-model", "none", "--policy", "off", "--speculative-plan", "chain(2)", "--num-threads", "1"),
        *("--speculative-disable-batch-threshold", "4", "--loop", "plain", "--uvicorn-log-level", "info"),
    )
    assert config.engine_config.model == "some/model" and config.api_key == ("a", "b")
    assert config.engine.max_num_seqs == 3 and not config.engine.enable_prefix_caching
    assert config.engine.speculative_disable_batch_threshold == 4 and config.served_model_name == ("m",)


def test_the_model_is_named_once() -> None:
    assert parsed("--model", "m").engine_config.model == "m"
    with pytest.raises(ConfigError, match="one model"):
        parsed("a", "--model", "b")


@pytest.mark.parametrize("flags", [["--port", "70000"], ["--max-body-bytes", "0"], ["--api-key", ""]])
def test_wrong_values_are_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err


def test_unknown_flags_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-num-seq", "4"]) == 2
    assert "--max-num-seqs" in capsys.readouterr().err


def test_a_missing_model_is_an_error_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--model", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert "error: " in said and "nowhere" in said and "Traceback" not in said


def test_a_taken_port_is_said_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            listen("127.0.0.1", port)
        assert main(["serve", "--port", str(port), "--model", "/nonexistent"]) == 2
    assert "free address" in capsys.readouterr().err


def test_flags_need_no_torch() -> None:
    code = "import sys, wingbeat.cli.serve; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
