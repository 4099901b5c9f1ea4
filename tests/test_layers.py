"""What import-linter cannot say: words that must not leak downward, imports that must stay away, ASCII sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "wingbeat"
FORBIDDEN = ("draft", "spec", "eagle", "tree")
BLIND = [PACKAGE / "cache", PACKAGE / "runtime", PACKAGE / "engine" / "scheduler.py"]
"""Paging, running and scheduling know nothing of speculation."""

IMPORT_LIGHT = """
import sys
from importlib.abc import MetaPathFinder

BLOCKED = {"torch", "triton", "fastapi", "numba", "transformers"}

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} was imported")
        return None

sys.meta_path.insert(0, Refuse())
import wingbeat, wingbeat.lab, wingbeat.cli.main, wingbeat.config, wingbeat.types
"""


def sources(*roots: Path) -> list[Path]:
    found = [p for root in roots for p in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    assert found
    return found


def identifiers(source: str) -> set[str]:
    """Every name a module binds, reads, imports or takes as an argument."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.update((name, asname or ""))
            case ast.ImportFrom(module=str(module)):
                names.add(module)
    return names


def forbidden(source: str) -> set[str]:
    """Identifiers that contain a forbidden word as a whole word: `draft_len`, `SpecPlan`, not `specific`."""
    return {name for name in identifiers(source) if set(words(name)) & {*FORBIDDEN, *(w + "s" for w in FORBIDDEN)}}


def words(name: str) -> list[str]:
    """Lower-case words of a snake, dotted or camel name, digits dropped."""
    spaced = "".join(f" {c}" if c.isupper() else c if c.isalpha() else " " for c in name)
    return spaced.lower().split()


@pytest.mark.parametrize("path", sources(*BLIND), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_speculation_does_not_leak_downward(path: Path) -> None:
    if path.name.startswith("test_"):
        pytest.skip("tests may speak of anything")
    assert not forbidden(path.read_text())


def test_the_word_rule_sees_what_it_should() -> None:
    assert forbidden("def f(num_draft_rows): pass") == {"num_draft_rows"}
    assert forbidden("from wingbeat.spec.plan import OFF") == {"wingbeat.spec.plan"}
    assert forbidden("class TreeMask: ...\nx.eagle3 = g(spec=1)") == {"TreeMask", "eagle3", "spec"}
    assert forbidden("specific = street(respect)  # a tree in a comment") == set()


def test_base_and_lab_need_no_engine_packages() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_LIGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_sources_are_ascii() -> None:
    wrong = [str(p) for p in sources(PACKAGE, Path(__file__).parent) if not p.read_bytes().isascii()]
    assert not wrong
