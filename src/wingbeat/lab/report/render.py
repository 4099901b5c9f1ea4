"""Charts to SVG and PNG, without a browser or the network."""

from __future__ import annotations

import altair as alt
import vl_convert

from wingbeat.lab.report.theme import styled

Drawable = alt.Chart | alt.LayerChart | alt.VConcatChart | alt.HConcatChart


def to_svg(chart: Drawable) -> str:
    """An <svg> element to be placed into a page."""
    svg = str(vl_convert.vegalite_to_svg(styled(chart).to_json()))
    return svg[svg.index("<svg") :]


def to_png(chart: Drawable) -> bytes:
    """A picture on white, at twice the nominal size."""
    spec = styled(chart).to_dict()
    spec["background"] = "#ffffff"
    spec["padding"] = 18
    spec["config"]["background"] = "#ffffff"
    return bytes(vl_convert.vegalite_to_png(spec, scale=2))
