"""The charts of the report, each a function from figures to an Altair chart."""

# Altair's own annotations are partial: its wrappers of untyped schema classes would fail the strict checks.
# mypy: disallow-untyped-calls=False, warn-return-any=False

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import altair as alt

from wingbeat.lab.crossover import Answer, Crossover
from wingbeat.lab.judge import ArmJudgement, Judgement
from wingbeat.lab.ledger import Run
from wingbeat.lab.metrics import (
    BASELINES,
    CellFigures,
    PositionAcceptance,
    TimeSplit,
    domains,
    is_auto,
    short_name,
    valid_blocks,
)
from wingbeat.lab.report.content import Content
from wingbeat.lab.report.theme import AUTO, BASE, INK, MUTED, PARTS

Row = dict[str, str | float | None]
Rows = list[Row]
Colours = Mapping[str, str]
WIDTH = 270
LETTER = 5.8
"""Mean width of a letter of the picture's verdict, in the unit of WIDTH."""
LOAD = "concurrent requests"


def _load_scale(points: Sequence[int]) -> alt.Scale:
    return alt.Scale(type="log", base=2, nice=False, domain=[min(points) / 1.12, max(points) * 1.12])


def _load_axis(points: Sequence[int], title: str | None, labels: bool = True) -> alt.X:
    axis = alt.Axis(values=list(points), grid=False, labels=labels, format="d")
    return alt.X("concurrency:Q", scale=_load_scale(points), axis=axis, title=title)


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... within a range, for the grid of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low * 0.98 <= m * 10.0**p <= high * 1.02]


def _arm_colour(colours: Colours, legend: bool) -> alt.Color:
    names = [short_name(arm) for arm in colours]
    shown = alt.Legend(symbolType="stroke", symbolSize=260, orient="top") if legend else None
    return alt.Color("arm:N", scale=alt.Scale(domain=names, range=list(colours.values())), legend=shown)


def throughput(
    domain: str, cells: Sequence[CellFigures], judgement: Judgement, colours: Colours, legend: bool = False
) -> alt.VConcatChart:
    """One domain: tokens per second over concurrency, and below it the ratio to the baseline with the crossover."""
    own = [cell for cell in cells if cell.domain == domain]
    points = sorted({cell.concurrency for cell in own})
    # Every domain has the same scales, so that panels can be compared by eye.
    speeds = [cell.tokens_per_s for cell in cells]
    panels = [_speed_panel(domain, own, points, colours, (min(speeds), max(speeds)), legend)]
    if judgement.arms:
        panels.append(_ratio_panel(domain, judgement, points, colours))
    return alt.vconcat(*panels, spacing=10)


def _speed_panel(
    domain: str,
    cells: Sequence[CellFigures],
    points: Sequence[int],
    colours: Colours,
    reach: tuple[float, float],
    legend: bool,
) -> alt.LayerChart:
    rows: Rows = [
        {"arm": short_name(c.arm), "concurrency": c.concurrency, "speed": round(c.tokens_per_s, 2)} for c in cells
    ]
    axis = alt.Axis(values=_decades(*reach), format="~s")
    scale = alt.Scale(type="log", nice=False, domain=[reach[0] * 0.9, reach[1] * 1.1])
    y = alt.Y("speed:Q", scale=scale, axis=axis)
    lines = alt.Chart(alt.Data(values=rows)).encode(
        x=_load_axis(points, None, labels=False),
        y=y.title("output tok/s (log)"),
        color=_arm_colour(colours, legend),
    )
    drawn = lines.mark_line(strokeWidth=2) + lines.mark_point(size=26, filled=True, opacity=1)
    return drawn.properties(width=WIDTH, height=150, title=domain)


def _ratio_panel(domain: str, judgement: Judgement, points: Sequence[int], colours: Colours) -> alt.LayerChart:
    rows: Rows = []
    for arm in judgement.arms:
        for (name, concurrency), ratio in arm.ratios.items():
            if name == domain:
                row: Row = {"arm": short_name(arm.arm), "concurrency": concurrency, "ratio": ratio.value}
                rows.append({**row, "low": ratio.low, "high": ratio.high})
    base = alt.Chart(alt.Data(values=rows)).encode(x=_load_axis(points, LOAD), color=_arm_colour(colours, legend=False))
    everything = [bound for arm in judgement.arms for r in arm.ratios.values() for bound in (r.value, r.low, r.high)]
    known = [1.0, *(bound for bound in everything if bound is not None)]
    # An interval from two blocks can be enormous; the axis shows ratios from 0 to 4 at most.
    scale = alt.Scale(domain=[max(min(known) - 0.05, 0), min(max(known) + 0.05, 4)], nice=False, zero=False, clamp=True)
    # Layers share the axis, and one layer without a title would take it from all: each states the same.
    title = f"ratio to {short_name(judgement.baseline or '')}"
    y = alt.Y("ratio:Q", scale=scale, axis=alt.Axis(tickCount=4), title=title)
    layers: list[alt.Chart | alt.LayerChart] = [
        _level(scale, title),
        *_marks(domain, judgement.arms, colours, points),
        base.mark_area(opacity=0.18, line=False).encode(
            y=alt.Y("low:Q", scale=scale, title=title), y2="high:Q", fill=_fill(colours)
        ),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_point(size=22, filled=True, opacity=1).encode(y=y),
    ]
    return alt.LayerChart(layer=layers).properties(width=WIDTH, height=120)


def _fill(colours: Colours) -> alt.Fill:
    names = [short_name(arm) for arm in colours]
    return alt.Fill("arm:N", scale=alt.Scale(domain=names, range=list(colours.values())), legend=None)


def _level(scale: alt.Scale, title: str) -> alt.Chart:
    """The line at 1: above it speculation pays."""
    rule = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(color=BASE, strokeWidth=1.2)
    return rule.encode(y=alt.Y("one:Q", scale=scale, title=title))


def _marks(
    domain: str, arms: Sequence[ArmJudgement], colours: Colours, points: Sequence[int]
) -> list[alt.Chart | alt.LayerChart]:
    """Crossover and interval of every fixed arm that crosses within the range."""
    found = [
        (arm.arm, arm.crossovers[domain])
        for arm in arms
        if domain in arm.crossovers
        and not is_auto(arm.arm)
        and arm.arm not in BASELINES
        and arm.crossovers[domain].answer is Answer.NUMBER
    ]
    return [mark for i, (arm, crossing) in enumerate(found) for mark in _mark(crossing, colours[arm], points, i)]


def _mark(crossing: Crossover, colour: str, points: Sequence[int], line: int) -> list[alt.Chart | alt.LayerChart]:
    row = {
        "at": crossing.value,
        "low": crossing.low or min(points),
        "high": crossing.high or max(points),
        "label": f"C = {crossing.value:.2g}",
    }
    base, scale = alt.Chart(alt.Data(values=[row])), _load_scale(points)
    marks: list[alt.Chart | alt.LayerChart] = []
    if crossing.has_interval:
        band = base.mark_rect(color=colour, opacity=0.16)
        marks.append(band.encode(x=alt.X("low:Q", scale=scale, title=LOAD), x2="high:Q"))
    at = alt.X("at:Q", scale=scale, title=LOAD)
    marks.append(base.mark_rule(color=colour, strokeDash=[3, 3]).encode(x=at))
    text = base.mark_text(align="left", dx=5, dy=2, baseline="top", color=colour, fontWeight="bold", fontSize=11)
    marks.append(text.encode(x=at, y=alt.value(13 * line), text="label:N"))
    return marks


def picture(
    run: Run, cells: Sequence[CellFigures], content: Content, judgement: Judgement, colours: Colours
) -> alt.HConcatChart:
    """All domains side by side under the verdict: the one picture of the run."""
    names = domains(run)
    panels = [throughput(name, cells, judgement, colours, legend=True) for name in names]
    letters = int(len(names) * (WIDTH + 75) / LETTER)
    words = [line for text in content.verdict for line in textwrap.wrap(text, letters, subsequent_indent="   ")]
    title = alt.TitleParams(
        content.title,
        subtitle=words,
        color=INK,
        subtitleColor=INK,
        fontSize=20,
        subtitleFontSize=12,
        subtitleLineHeight=17,
        subtitlePadding=8,
        anchor="start",
        offset=18,
    )
    return alt.hconcat(*panels, spacing=28, title=title)


def acceptance_chart(arm: str, rows: Sequence[PositionAcceptance], colours: Colours) -> alt.LayerChart:
    """Conditional acceptance by draft position, one line per domain."""
    values: Rows = [{"domain": r.domain, "position": r.position, "rate": r.conditional} for r in rows]
    colour = alt.Color("domain:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None)
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("position:O", title="draft position", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("rate:Q", title="accepted, if all before", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%")),
        color=colour,
    )
    drawn = base.mark_line(strokeWidth=2) + base.mark_point(size=26, filled=True, opacity=1)
    return drawn.properties(width=WIDTH, height=150, title=short_name(arm))


def time_chart(arm: str, splits: Sequence[TimeSplit]) -> alt.Chart:
    """Shares of step time, one bar per concurrency."""
    values: Rows = [
        {"concurrency": split.concurrency, "part": part, "share": share, "place": place}
        for split in splits
        for place, (part, share) in enumerate(split.shares)
    ]
    return (
        alt.Chart(alt.Data(values=values))
        .mark_bar(size=22)
        .encode(
            x=alt.X("concurrency:O", title=LOAD, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("share:Q", title="share of step time", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%")),
            color=alt.Color("part:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())), legend=None),
            order=alt.Order("place:Q"),
        )
        .properties(width=WIDTH, height=150, title=short_name(arm))
    )


def timeline_chart(run: Run, domain: str) -> alt.VConcatChart | None:
    """Auto's depth and the running sequences, the first block of each concurrency one after the other."""
    values, borders = _timeline(run, domain)
    if not values:
        return None
    data = alt.Data(values=values)
    x = alt.X("at:Q", axis=alt.Axis(grid=False, tickCount=5))
    starts = alt.Chart(alt.Data(values=borders)).encode(x="at:Q")
    depth = alt.Chart(data).mark_line(interpolate="step-after", color=AUTO, strokeWidth=2)
    top_y = alt.Y("depth:Q", title="depth", axis=alt.Axis(tickMinStep=1, tickCount=4))
    rules = starts.mark_rule(color=MUTED, opacity=0.35, strokeDash=[2, 3])
    names = starts.mark_text(align="left", dx=3, color=MUTED, fontSize=10, baseline="bottom").encode(
        y=alt.value(-1), text="label:N"
    )
    top = rules + depth.encode(x=x.title(None).axis(grid=False, labels=False), y=top_y) + names
    area = alt.Chart(data).mark_area(interpolate="step-after", color=BASE, opacity=0.45)
    low = rules + area.encode(
        x=x.title("seconds of auto's blocks, one after the other"),
        y=alt.Y("running:Q", title="running", axis=alt.Axis(tickCount=3)),
    )
    title = alt.TitleParams(domain, color=INK, offset=18)
    return alt.vconcat(
        top.properties(width=WIDTH, height=80, title=title), low.properties(width=WIDTH, height=60), spacing=8
    )


def _timeline(run: Run, domain: str) -> tuple[Rows, Rows]:
    values: Rows = []
    borders: Rows = []
    seen: set[int] = set()
    start = 0.0
    for block in valid_blocks(run):
        if block.domain != domain or not is_auto(block.arm) or not block.plans or block.concurrency in seen:
            continue
        seen.add(block.concurrency)
        borders.append({"at": start, "label": f"C={block.concurrency}"})
        values += [{"at": start + p.at_s, "depth": p.depth, "running": p.num_running} for p in block.plans]
        start += max(p.at_s for p in block.plans) + 0.5
    return values, borders
