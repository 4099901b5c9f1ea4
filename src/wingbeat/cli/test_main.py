from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from wingbeat.cli import main as cli
from wingbeat.errors import CheckpointError, LabError, RequestError, WingbeatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    num_rows: int = 1


@pytest.fixture
def run_toy(monkeypatch: pytest.MonkeyPatch):
    """Runs a command line with every command replaced by `Toy` and the given body."""

    def run(argv: list[str], body) -> int:
        monkeypatch.setattr(cli, "COMMANDS", {"toy": cli.Command("toy", "Toy", "a toy", announce=True)})
        monkeypatch.setattr(cli, "import_module", lambda _: SimpleNamespace(Toy=Toy, run=body))
        return cli.main(argv)

    return run


def raiser(error: Exception):
    def body(_: Toy) -> int:
        raise error

    return body


def test_runs_a_command_and_announces_origins(run_toy, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Toy] = []
    assert run_toy(["toy", "--num-rows", "7"], lambda c: seen.append(c) or 3) == 3
    assert seen == [Toy(num_rows=7)]
    assert "num_rows = 7  (flag)" in capsys.readouterr().err


def test_settings_come_from_a_file(run_toy, tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("num_rows = 5\n")
    assert run_toy(["toy", "--config", str(file)], lambda c: c.num_rows) == 5
    assert run_toy(["toy", "--config", str(file), "--num-rows", "6"], lambda c: c.num_rows) == 6


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("no such model"), 2),
        (RequestError("prompt", "", "at least one token"), 2),
        (LabError("no runs"), 1),
        (WingbeatError("plain"), 1),
    ],
)
def test_errors_become_one_line_and_a_code(
    run_toy, capsys: pytest.CaptureFixture[str], error: WingbeatError, code: int
) -> None:
    assert run_toy(["toy"], raiser(error)) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {error}"


def test_unknown_flag_is_bad_usage_with_a_hint(run_toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_toy(["toy", "--num-row", "7"], lambda _: 0) == 2
    assert "--num-rows" in "".join(capsys.readouterr())


def test_unknown_command_is_bad_usage_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serv"]) == 2
    assert "did you mean 'serve'" in capsys.readouterr().err
    assert cli.main(["bench", "paralel"]) == 2
    assert "did you mean 'bench parallel'" in capsys.readouterr().err


def test_two_word_commands_are_found() -> None:
    assert cli.find_command(["bench", "single", "--url", "x"]) == ("bench single", ["--url", "x"])
    assert cli.find_command(["bench"]) == (None, [])


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_torch(_: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "import_module", no_torch)
    assert cli.main(["serve"]) == 2
    assert "wingbeat[engine]" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_help_and_version_need_no_heavy_import(argv: list[str]) -> None:
    code = (
        "import sys; from wingbeat.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numba', 'fastapi', 'numpy', 'tyro'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "wingbeat" in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_reads_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    assert "--" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "value"), [("--temperature", "-1"), ("--max-tokens", "0"), ("--prompt", "")])
def test_generate_refuses_before_it_loads(
    flag: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wingbeat.engine.engine.Engine.from_config", lambda *_: pytest.fail("it was loaded"))
    assert cli.main(["generate", "--prompt", "x", f"{flag}={value}"]) == 2
    assert f"error: {flag[2:].replace('-', '_')}=" in capsys.readouterr().err


def test_every_command_in_the_table_exists() -> None:
    for name, command in cli.COMMANDS.items():
        module = cli._load(name, command)
        assert callable(module.run), name
        assert isinstance(getattr(module, command.config), type), name
