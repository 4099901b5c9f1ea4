"""wingbeat report: one page and picture from a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Writes a self-contained HTML page, and a picture, Markdown and JSON beside it."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The directory of a run."""
    out: Path | None = None
    """The page; by default report.html in the run's directory."""


def run(config: Report) -> int:
    """Paths to stdout, the verdict to stderr. Exit code 0."""
    from wingbeat.lab.ledger import read_run
    from wingbeat.lab.report import write_report
    from wingbeat.lab.verdict import verdict_lines

    paths = write_report(config.run_dir, config.out or config.run_dir / "report.html")
    print("\n".join(verdict_lines(read_run(config.run_dir))), file=sys.stderr)
    print("\n".join(str(path) for path in paths))
    return 0
