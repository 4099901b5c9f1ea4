"""Plants one listed fault at a time in a copy of the source tree; the named tests must fail for each.

    python tests/mutants/mutate.py [--only NAME ...] [--list faults.toml] [--jobs 2]

A fault is a name, a file, the exact text that stands there once, what replaces it, and the pytest selection that must
notice. A fault whose tests still pass has survived: the tests have a hole. One line per fault is printed; exit code 1
if any survives or cannot be planted. The working tree is copied once at the start and never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "pyproject.toml")
TESTS_FAILED = 1
"""pytest's exit code for failed tests; 2 to 5 mean that they did not run, which proves nothing."""
Outcome = Literal["killed", "SURVIVED", "unusable"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Paths and node ids."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault."""

    fault: Fault
    outcome: Outcome
    detail: str
    seconds: float


def read_faults(path: Path) -> list[Fault]:
    """The faults of a TOML file, `[[fault]]` tables. Raises ValueError for a repeated name or no change."""
    tables = tomllib.loads(path.read_text())["fault"]
    faults = [Fault(t["name"], t["file"], t["old"], t["new"], tuple(t["tests"])) for t in tables]
    names = [fault.name for fault in faults]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: a name is listed twice")
    if same := [fault.name for fault in faults if fault.old == fault.new]:
        raise ValueError(f"{path}: old and new text are equal in {same}")
    return faults


def plant(fault: Fault, tree: Path) -> None:
    """Edits the copy. Raises ValueError unless the old text stands in the file exactly once."""
    file = tree / fault.file
    text = file.read_text() if file.is_file() else ""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: the old text occurs {count} times, expected once")
    file.write_text(text.replace(fault.old, fault.new))


def try_fault(fault: Fault, root: Path, timeout_s: float) -> Verdict:
    """Copies the tree, plants the fault, runs its tests. A hang counts as noticed."""
    start = monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(root, tree)
        try:
            plant(fault, tree)
        except ValueError as error:
            return Verdict(fault, "unusable", str(error), monotonic() - start)
        own_cache = tree / "cache" if "kernels/" in fault.file else None
        outcome, detail = judge(run_tests(fault.tests, tree, timeout_s, own_cache))
    return Verdict(fault, outcome, detail, monotonic() - start)


def copy_tree(root: Path, tree: Path) -> None:
    """What the tests need. Times are kept: Numba's cache beside a source goes by them, and so notices a fault."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.pyc"), symlinks=True)
        elif source.is_file():
            shutil.copy2(source, tree / name)


@dataclass(frozen=True, slots=True)
class Outputs:
    """How a pytest run ended; `code` is None when it hung."""

    code: int | None
    lines: list[str]


def run_tests(tests: tuple[str, ...], tree: Path, timeout_s: float, own_cache: Path | None = None) -> Outputs:
    """Runs the selection inside the copy, importing from the copy.

    `own_cache`: where a changed kernel's compiled code goes, instead of staying in the user's cache for ever.
    """
    options = ["-x", "-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    paths = [str(tree / "src"), str(tree / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    env["OMP_NUM_THREADS"] = "1"  # jobs run side by side; threads beyond the cores spin while they wait for one another
    if own_cache is not None:
        env["XDG_CACHE_HOME"] = str(own_cache)
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outputs(None, [f"hung for {timeout_s:.0f} s"])
    return Outputs(done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()])


def judge(outputs: Outputs) -> tuple[Outcome, str]:
    """Only failed tests (or a hang) notice a fault."""
    last = (outputs.lines or ["no output"])[-1]
    if outputs.code is None:
        return "killed", last
    if outputs.code == TESTS_FAILED:
        return "killed", next((line for line in outputs.lines if line.startswith(("FAILED", "ERROR"))), last)
    if outputs.code == 0:
        return "SURVIVED", last
    return "unusable", f"pytest exit code {outputs.code}: {last}"


def check_baseline(faults: Sequence[Fault], tree: Path, timeout_s: float) -> str | None:
    """Runs every named test without a fault; a reason to stop, or None. Tests that fail anyway notice nothing."""
    tests = tuple(dict.fromkeys(word for fault in faults for word in fault.tests))
    start = monotonic()
    outputs = run_tests(tests, tree, timeout_s)
    if outputs.code != 0:
        return "\n".join(["without any fault:", *outputs.lines[-15:]])
    print(f"without a fault all named tests pass ({monotonic() - start:.1f} s)", flush=True)
    return None


def try_all(faults: Sequence[Fault], root: Path, jobs: int, timeout_s: float) -> list[Verdict]:
    """Verdicts in order, each printed as it comes."""
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(lambda fault: try_fault(fault, root, timeout_s), faults):
            print(row(verdict), flush=True)
            verdicts.append(verdict)
    return verdicts


def row(verdict: Verdict) -> str:
    return f"{verdict.outcome:<9} {verdict.fault.name:<36} {verdict.seconds:6.1f} s  {verdict.detail[:110]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant listed faults; some test must fail for each.")
    parser.add_argument("--list", type=Path, default=Path(__file__).parent / "faults.toml")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args(argv)
    faults = [f for f in read_faults(options.list) if not options.only or f.name in options.only]
    if not faults:
        print("no such fault", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(options.root, tree)
        if (reason := check_baseline(faults, tree, 2 * options.timeout_s)) is not None:
            print(reason)
            return 1
        verdicts = try_all(faults, tree, options.jobs, options.timeout_s)
    killed = sum(v.outcome == "killed" for v in verdicts)
    print(f"{killed} of {len(verdicts)} faults were noticed")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
