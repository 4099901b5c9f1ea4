"""Writes the report of a run: page, picture, Markdown and JSON, all from one judgement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from wingbeat.errors import LabError
from wingbeat.lab.judge import Judgement, judge_run
from wingbeat.lab.ledger import Run, read_run
from wingbeat.lab.metrics import acceptance, arms, cell_figures, domains, short_name, time_splits, valid_blocks
from wingbeat.lab.report import charts
from wingbeat.lab.report.content import Content, content_of
from wingbeat.lab.report.render import Drawable, to_png, to_svg
from wingbeat.lab.report.theme import PARTS, arm_colours, domain_colours


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The charts of the page as SVG, and the keys to their colours."""

    throughput: tuple[Markup, ...]
    acceptance: tuple[Markup, ...]
    time: tuple[Markup, ...]
    timeline: tuple[Markup, ...]
    arm_key: tuple[tuple[str, str], ...]
    domain_key: tuple[tuple[str, str], ...]
    part_key: tuple[tuple[str, str], ...]


def write_report(run_dir: Path, out_html: Path) -> list[Path]:
    """Paths written: the page at `out_html`, and beside it .png, .md and .json. Raises LabError for an empty run."""
    run = read_run(run_dir)
    if not valid_blocks(run):
        reason = next((block.invalid[0] for block in run.blocks if block.invalid), "no block was finished")
        raise LabError(f"{run_dir} holds no usable block: {reason}")
    judgement = judge_run(run)
    content = content_of(run, judgement)
    out_html.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        out_html: _render("page.html.j2", content, figures_of(run, judgement)),
        out_html.with_suffix(".md"): _render("summary.md.j2", content, None),
        out_html.with_suffix(".json"): summary_json(run, judgement, content),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    picture = out_html.with_suffix(".png")
    colours = arm_colours(arms(run), judgement.baseline)
    picture.write_bytes(to_png(charts.picture(run, cell_figures(run), content, judgement, colours)))
    return [out_html, picture, *list(texts)[1:]]


def figures_of(run: Run, judgement: Judgement) -> Figures:
    """All charts of the page."""
    cells, accepted, splits = cell_figures(run), acceptance(run), time_splits(run)
    by_arm, by_domain = arm_colours(arms(run), judgement.baseline), domain_colours(domains(run))
    drawn: dict[str, list[Drawable]] = {
        "throughput": [charts.throughput(name, cells, judgement, by_arm) for name in domains(run)],
        "acceptance": [
            charts.acceptance_chart(arm, rows, by_domain)
            for arm in arms(run)
            if (rows := [row for row in accepted if row.arm == arm])
        ],
        "time": [
            charts.time_chart(arm, own) for arm in arms(run) if (own := [split for split in splits if split.arm == arm])
        ],
        "timeline": [chart for name in domains(run) if (chart := charts.timeline_chart(run, name)) is not None],
    }
    # Our own renderer made these; it escapes the names in them.
    svgs = {name: tuple(Markup(to_svg(chart)) for chart in group) for name, group in drawn.items()}
    return Figures(
        **svgs,
        arm_key=tuple((short_name(arm), colour) for arm, colour in by_arm.items()),
        domain_key=tuple(by_domain.items()),
        part_key=tuple(PARTS.items()),
    )


def _render(template: str, content: Content, figures: Figures | None) -> str:
    """Autoescape is on for the page only: Markdown is read as text."""
    environment = Environment(
        loader=PackageLoader("wingbeat.lab.report", "templates"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(content=content, figures=figures)


def summary_json(run: Run, judgement: Judgement, content: Content) -> str:
    """The figures for machines: verdict, cells, ratios, crossovers, auto's test, fingerprint."""
    auto = judgement.auto
    page = {
        "run_id": run.record.run_id,
        "status": run.record.status,
        "verdict": content.verdict,
        "caveats": content.caveats,
        "cells": [asdict(cell) for cell in cell_figures(run)],
        "ratios": [
            {"arm": arm.arm, "domain": domain, "concurrency": c, **asdict(ratio)}
            for arm in judgement.arms
            for (domain, c), ratio in arm.ratios.items()
        ],
        "crossovers": [
            {"arm": arm.arm, "domain": domain, "text": str(found), **asdict(found), "answer": found.answer.value}
            for arm in judgement.arms
            for domain, found in arm.crossovers.items()
        ],
        "auto": None
        if auto is None
        else {
            "pooled": asdict(auto.pooled),
            "bound": auto.bound,
            "held": auto.held,
            "failed_cells": auto.failed_cells,
        },
        "acceptance": [asdict(row) for row in acceptance(run)],
        "time": [{"arm": s.arm, "concurrency": s.concurrency, **dict(s.shares)} for s in time_splits(run)],
        "fingerprint": run.record.fingerprint.dimensions,
    }
    return json.dumps(page, indent=2) + "\n"
