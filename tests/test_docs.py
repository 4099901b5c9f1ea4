"""What the documentation names must be there: code, files, flags, endpoints, links. The code is parsed, not run."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from wingbeat.cli.main import COMMANDS, _load, find_command
from wingbeat.config import field_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "wingbeat"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_OURS = {"ImmutableSandboxedEnvironment", "transformers.AutoTokenizer", "config.json", "tokenizer.json"}
FIELDS_OF_ANSWERS = {"beliefs.acceptance", "usage.speculation"}
EVERY_COMMAND_TAKES = {"config", "help"}

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\.(?:py|md|toml)|[\w.-]+(?:/[\w.-]+)*/")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
CAMEL = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+")
FUNCTION = re.compile(r"_?[a-z]+(?:_[a-z]+)+")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
ENDPOINT = re.compile(
    r"(?:(?<=:8000)|(?<![\w.:/-]))/(?:v1/[a-z/]+[a-z]|metrics|health|version|server_info|reset_prefix_cache)\b"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

Names = dict[str, set[str]]


@cache
def defined() -> Names:
    """Name -> names of its members, for every folder, module, class, function and constant of the package."""
    names: Names = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name.startswith("test_"):
            continue
        tree = ast.parse(path.read_text())
        names[path.parent.name].add(path.stem)
        names[path.parent.parent.name].add(path.parent.name)
        names[path.stem] |= members(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names[node.name] |= members(node)
            for name in members(node) if isinstance(node, ast.Module | ast.ClassDef) else ():
                names[name] |= set()
    return names


def members(scope: ast.AST) -> set[str]:
    """What a module or class defines: its statements, and what its methods put on self."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found.update(t.id for t in targets if isinstance(t, ast.Name))
        if isinstance(scope, ast.ClassDef):
            stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            found.update(n.attr for n in stores)
    return found


@cache
def endpoints() -> set[str]:
    routes = re.compile(r'@router\.(?:get|post)\("([^"{]+)"\)')
    return {path for file in (PACKAGE / "server").glob("*.py") for path in routes.findall(file.read_text())}


@cache
def flags_of(command: str) -> set[str]:
    names = field_names(getattr(_load(command, COMMANDS[command]), COMMANDS[command].config))
    return {name.replace("_", "-") for name in names} | EVERY_COMMAND_TAKES


def spans(text: str) -> list[str]:
    """Words in backticks, fenced blocks left out."""
    return [word.strip(",;:") for span in SPAN.findall(FENCE.sub("", text)) for word in span.split()]


def missing_files(text: str) -> set[str]:
    """Paths from the repository's root or from the package."""
    paths = {word for word in spans(text) if FILE.fullmatch(word)}
    return {path for path in paths if not any((base / path).exists() for base in (ROOT, PACKAGE))}


def missing_names(text: str) -> set[str]:
    """`Class`, `Class.member`, `module.name`; the first parts of longer names are folders."""
    missing: set[str] = set()
    for word in {word.split("(")[0] for word in spans(text)} - NOT_OURS - FIELDS_OF_ANSWERS:
        if FILE.fullmatch(word) or not (DOTTED.fullmatch(word) or CAMEL.fullmatch(word)):
            continue
        *_, owner, name = ["", *word.split(".")]
        if name not in (defined().get(owner, set()) if owner else defined()):
            missing.add(word)
    return missing


def missing_functions(text: str) -> set[str]:
    """snake_case words; only where no other project's words are explained."""
    words = {word.split("(")[0] for word in spans(text)}
    return {word for word in words if FUNCTION.fullmatch(word) and word not in defined()}


def missing_flags(text: str) -> set[str]:
    """Flags of `wingbeat COMMAND ...` must be that command's, other ones in backticks some command's."""
    missing: set[str] = set()
    for line in re.findall(r"\bwingbeat ([a-z][^`\n]*)", text):
        command, rest = find_command([word for word in line.split() if word != "COMMAND"])
        assert command is not None, line
        missing |= set(FLAG.findall(" ".join(rest))) - flags_of(command)
    anywhere = set().union(*map(flags_of, COMMANDS))
    return missing | (set(FLAG.findall(" ".join(spans(text)))) - anywhere)


def missing_endpoints(text: str) -> set[str]:
    return set(ENDPOINT.findall(text)) - endpoints()


def missing_links(path: Path) -> set[str]:
    return {link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    found = [missing(text) for missing in (missing_files, missing_names, missing_flags, missing_endpoints)]
    assert not set().union(*found, missing_links(page))


def test_functions_of_the_story_are_there() -> None:
    assert not missing_functions((ROOT / "docs" / "architecture.md").read_text())


def test_decisions_are_numbered_without_gaps() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    assert [int(page.read_text().split(".")[0].removeprefix("# ")) for page in pages] == list(range(1, len(pages) + 1))


def test_what_is_not_there_is_seen() -> None:
    assert missing_files("`engine/step.py`, `engine/stop.py`, `cache/`, `cash/`") == {"engine/stop.py", "cash/"}
    assert missing_names("`Rule.resolve(3)` `Rule.dissolve` `cache.pool.KVPool` `NoSuchThing` `StepPlan`") == {
        "Rule.dissolve",
        "NoSuchThing",
    }
    assert missing_functions("`keep_best`, `keep_worst`, `AUTO_RULES`") == {"keep_worst"}
    assert missing_flags("`--port` `--harbour`\n```\nwingbeat doctor --port 1\n```") == {"harbour", "port"}
    assert missing_endpoints("curl http://127.0.0.1:8000/v1/no and `GET /v1/models`, `/metrics`") == {"/v1/no"}
    assert missing_endpoints("`POST /v1/nothing`") == {"/v1/nothing"}
