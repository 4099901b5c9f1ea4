"""The fault planter on a toy tree: notices, survivors, faults that cannot be planted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mutants.mutate import ROOT, Fault, main, plant, read_faults, try_fault

SHIPPED = Path(__file__).parent / "faults.toml"
CODE = "def double(x):\n    return x * 2\n\n\ndef unused(x):\n    return x\n"
TEST = "from toy import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
LIST = """
[[fault]]
name = "times three"
file = "src/toy.py"
old = "x * 2"
new = "x * 3"
tests = ["tests/test_toy.py"]
"""
SURVIVOR = """
[[fault]]
name = "nobody looks"
file = "src/toy.py"
old = "    return x\\n"
new = "    return None\\n"
tests = ["tests/test_toy.py"]
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in (("src/toy.py", CODE), ("tests/test_toy.py", TEST), ("faults.toml", LIST)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(toy: Path) -> int:
    return main(["--root", str(toy), "--list", str(toy / "faults.toml")])


def test_a_noticed_fault_passes_and_leaves_the_tree_alone(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(toy) == 0
    assert "1 of 1 faults were noticed" in capsys.readouterr().out
    assert (toy / "src/toy.py").read_text() == CODE


def test_a_survivor_fails_the_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "faults.toml").write_text(LIST + SURVIVOR)
    assert run(toy) == 1
    out = capsys.readouterr().out
    assert "SURVIVED  nobody looks" in out
    assert "1 of 2" in out


def test_tests_that_fail_anyway_stop_the_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "tests/test_toy.py").write_text(TEST.replace("6", "7"))
    assert run(toy) == 1
    assert "without any fault" in capsys.readouterr().out


@pytest.mark.parametrize("old", ["absent text", "return x"])
def test_old_text_must_stand_there_once(toy: Path, old: str) -> None:
    fault = Fault("f", "src/toy.py", old, "other", ("tests/test_toy.py",))
    with pytest.raises(ValueError, match="expected once"):
        plant(fault, toy)
    assert try_fault(fault, toy, 60).outcome == "unusable"


def test_tests_that_cannot_run_prove_nothing(toy: Path) -> None:
    fault = Fault("f", "src/toy.py", "x * 2", "x * 3", ("tests/test_absent.py",))
    assert try_fault(fault, toy, 60).outcome == "unusable"


def test_a_fault_that_hangs_is_noticed(toy: Path) -> None:
    fault = Fault("f", "src/toy.py", "return x * 2", "import time; time.sleep(60)", ("tests/test_toy.py",))
    assert try_fault(fault, toy, 3).outcome == "killed"


def test_the_shipped_list_can_be_planted(tmp_path: Path) -> None:
    for fault in read_faults(SHIPPED):
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / fault.file).read_text())
        plant(fault, tmp_path)
        assert fault.tests, fault.name


def test_the_shipped_list_names_tests_that_exist() -> None:
    tests = sorted({word for fault in read_faults(SHIPPED) for word in fault.tests})
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]


def test_a_list_may_not_repeat_a_name_or_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    for text in (LIST + LIST, LIST.replace("x * 3", "x * 2")):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"twice|equal"):
            read_faults(file)
