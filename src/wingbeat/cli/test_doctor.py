from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.cli import doctor
from wingbeat.cli.doctor import Doctor, Fact, cpu_features


def test_reads_the_feature_flags(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor : 1\nflags : other\n")
    assert cpu_features(file) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_features(tmp_path / "absent") == frozenset()


def test_says_which_kernels_and_why() -> None:
    facts = {fact.name: fact for fact in doctor.engine_facts()}
    assert facts["kernels, float32"].value.startswith("torch (")
    assert "float32" in facts["kernels, float32"].value
    assert facts["default drafter"].ok


def test_a_failed_check_is_a_line_not_a_crash() -> None:
    def fails() -> str:
        raise OSError("no such file\nmore")

    assert doctor._checked("model", fails) == Fact("model", "no such file", False)


def test_says_what_numbas_last_resort_lacks() -> None:
    """In a process of its own: numba chooses its layer once."""
    code = "from wingbeat.cli import doctor; print(doctor._checked('threads', doctor._numba_threading))"
    env = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert "workqueue" in done.stdout and "libgomp1" in done.stdout and "ok=False" in done.stdout, done.stderr


def test_other_threading_layers_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.np.ufunc.threading_layer", lambda: "omp")
    fact = doctor._checked("threads", doctor._numba_threading)
    assert fact.ok and fact.value.startswith("omp, ")


def test_json_is_one_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "engine_facts", lambda: [Fact("gpu", "none", False)])
    assert doctor.run(Doctor(json=True)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"name": "gpu", "value": "none", "ok": False} in facts


def test_runs_without_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numba"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from wingbeat.cli.main import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "! torch threads" in done.stdout
