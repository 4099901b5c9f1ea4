"""Every declared dependency is used: imported somewhere, or a tool that the Makefile calls."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = {"import-linter": "lint-imports", "mypy": "-m mypy", "pytest-xdist": "-n auto", "ruff": "-m ruff"}


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    return [normal(re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0]) for line in wanted]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> set[str]:
    """Distributions that some source file imports, at its top or within a function."""
    modules: set[str] = set()
    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module.partition(".")[0])
    names = packages_distributions()
    return {normal(found) for module in modules for found in names.get(module, [])}


def test_what_is_declared_is_used() -> None:
    unused = set(declared()) - imported() - TOOLS.keys()
    assert not unused, f"declared and never imported: {sorted(unused)}"


@pytest.mark.parametrize(("name", "call"), TOOLS.items())
def test_tools_are_called_by_the_makefile(name: str, call: str) -> None:
    assert name in declared() and call in (ROOT / "Makefile").read_text()


def test_nothing_is_declared_twice() -> None:
    assert len(declared()) == len(set(declared()))
