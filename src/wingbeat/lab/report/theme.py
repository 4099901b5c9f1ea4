"""Colours and type of the charts. The page restyles them for dark mode by attribute selectors, so each is unique."""

# Altair's configure methods return Any.
# mypy: warn-return-any=False

from __future__ import annotations

import altair as alt

from wingbeat.lab.metrics import BASELINES, is_auto

INK, MUTED, GRID = "#22262b", "#68707a", "#e3e5e8"
AUTO = "#1b6ca8"
BASE, PLAIN = "#7d858e", "#a9946f"
FIXED = ("#c4581c", "#7a559e", "#3f8a5c", "#a8842c", "#b03a5b")
DOMAINS = ("#2f7f86", "#c4803a", "#8a5f9e", "#5f8a3f", "#a84f5f", "#4f6fa8")
PARTS = {"draft": "#d08a4a", "verify": "#4a78a6", "accept": "#8f6fb0", "listen": "#5a9a78", "host": "#a9b0b8"}
FONT = "Liberation Sans"
"""Travels inside vl-convert, so pictures have letters on a machine without fonts."""


def arm_colours(arms: tuple[str, ...], base: str | None) -> dict[str, str]:
    """One colour per arm: grey for the baseline, blue for auto, warm ones for the fixed arms."""
    colours: dict[str, str] = {}
    for arm in arms:
        if arm == base:
            colours[arm] = BASE
        elif arm in BASELINES:
            colours[arm] = PLAIN
        elif is_auto(arm):
            colours[arm] = AUTO
        else:
            colours[arm] = FIXED[len(set(colours.values()) & set(FIXED)) % len(FIXED)]
    return colours


def domain_colours(domains: list[str]) -> dict[str, str]:
    return {domain: DOMAINS[i % len(DOMAINS)] for i, domain in enumerate(domains)}


def styled(chart: alt.Chart | alt.LayerChart | alt.VConcatChart | alt.HConcatChart) -> alt.TopLevelMixin:
    """The chart in the style of the report: no box, quiet grid, left-aligned titles, transparent ground."""
    return (
        chart.configure(background="transparent", font=FONT, padding=4)
        .configure_view(stroke=None)
        .configure_axis(
            domain=False,
            ticks=False,
            gridColor=GRID,
            labelColor=MUTED,
            titleColor=MUTED,
            labelFontSize=11,
            titleFontSize=11,
            titleFontWeight="normal",
            labelPadding=5,
            titlePadding=8,
        )
        .configure_title(anchor="start", color=INK, fontSize=13, fontWeight="bold", offset=10)
        .configure_legend(
            labelColor=INK, titleColor=MUTED, labelFontSize=12, symbolStrokeWidth=3, orient="top", title=None
        )
    )
