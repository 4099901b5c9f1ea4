"""wingbeat serve: its flags, and what it refuses before anything is served."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tyro

from wingbeat.cli.main import main
from wingbeat.cli.serve import Serve, banner, listen
from wingbeat.errors import ConfigError
from wingbeat.server.test_fake import TEMPLATE, FakeEngine
from wingbeat.text.test_detokenize import byte_tokenizer


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
        *("--speculative-model", "none", "--speculative-plan", "chain(2)", "--num-threads", "1"),
        *("--speculative-disable-batch-threshold", "4", "--loop", "plain", "--uvicorn-log-level", "info"),
    )
    assert config.engine_config.model == "some/model" and config.api_keys == ("a", "b")
    assert config.engine.max_num_seqs == 3 and not config.engine.enable_prefix_caching
    assert config.engine.speculative_disable_batch_threshold == 4 and config.model_names == ("m",)


def test_keys_and_names_add_up() -> None:
    flags = ("--api-key", "a", "--api-key", "b", "c", "--served-model-name", "m", "--served-model-name", "n")
    config = parsed(*flags, "--log-level", "info")
    assert config.api_keys == ("a", "b", "c") and config.model_names == ("m", "n")
    assert config.uvicorn_log_level == "info"


def test_the_banner_says_what_the_settings_came_to() -> None:
    lines = banner(FakeEngine().info(), "auto").splitlines()
    assert [line.split()[0] for line in lines] == ["model", "drafter", "kernels", "policy", "pages"]
    assert "none" in lines[1] and "nothing to speculate" in lines[3]


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "fancy"], "policy='fancy' is not valid: expected one of off"),
        (["--policy", "always:chain(99)"], "policy='always:chain(99)' is not valid: depth=99"),
        (["--speculative-plan", "hop(3)"], "speculative_plan='hop(3)' is not valid"),
        (["--speculative-disable-batch-threshold", "-1"], "speculative_disable_batch_threshold=-1 is not valid"),
        (["--speculative-disable-batch-threshold", "few"], "few"),
        (["--policy", "always"], "policy='always' is not valid: it needs a drafter"),
        (["--speculative-disable-batch-threshold", "4"], "it needs a drafter"),
        (["--speculative-model", "nowhere"], "speculative_model='nowhere' is not valid"),
        (["--speculative-model", "default"], "this drafter was made for another model"),
        (["--max-model-len", "257"], "max_model_len=257 is not valid: at most the model's 256"),
        (["--kv-cache-memory-bytes", "10"], "kv_cache_memory_bytes=10 is not valid"),
        (["--kernels", "fast"], "kernels='fast' is not valid"),
    ],
)
def test_what_cannot_work_is_said_before_any_weight_is_read(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_directory(tmp_path)  # it has no weights: reading any would be another error
    assert main(["serve", "--port", "0", "--model", str(model), *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err + printed.out and "Traceback" not in printed.err


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


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 288,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def model_directory(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of its own process, on a free port, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "wingbeat", "serve", "--port", str(port), "--num-threads", "1", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_for_health(process, url := f"http://127.0.0.1:{port}")
        yield process, url
    finally:
        process.kill()
        process.communicate(timeout=10)


def wait_for_health(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[1].decode())


def test_a_real_engine_serves_and_stops_on_sigterm(tmp_path: Path) -> None:
    model = str(model_directory(tmp_path))
    with started(model, "--load-format", "dummy", "--dtype", "float32", "--max-num-seqs", "4") as (process, url):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True, "seed": 1}
        whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
        assert whole["usage"]["completion_tokens"] == 8
        again = httpx.post(f"{url}/v1/chat/completions", json={**body, "n": 2}, timeout=30).json()
        assert again["choices"][0]["message"] == whole["choices"][0]["message"] != again["choices"][1]["message"]
        asked = {**body, "ignore_eos": False, "max_tokens": 100, "response_format": response_format()}
        held = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=30).json()
        assert json.loads(held["choices"][0]["message"]["content"])["x"] in ("y", "zz")
        long = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 300}, timeout=30)
        assert long.status_code == 400 and "max_model_len 256" in long.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/speculation", timeout=30).json()["plan"]["depth"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def response_format() -> dict[str, object]:
    schema = {"type": "object", "properties": {"x": {"enum": ["y", "zz"]}}, "required": ["x"]}
    return {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}
