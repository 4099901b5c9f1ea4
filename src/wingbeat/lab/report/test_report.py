"""The report of a simulated run: self-contained, escaped, complete, readable in the dark."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from wingbeat.errors import LabError
from wingbeat.lab.ledger import RunWriter
from wingbeat.lab.record import Fingerprint, RunRecord
from wingbeat.lab.report import theme, write_report
from wingbeat.lab.test_simulated import simulated_plan, write_simulated_run

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    plan = simulated_plan().model_copy(update={"model": HOSTILE})
    run = write_simulated_run(root, plan=plan, facts={"device": HOSTILE})
    return write_report(run, root / "out" / "report.html")


def test_four_files_are_written(paths):
    assert [path.name for path in paths] == ["report.html", "report.png", "report.md", "report.json"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_the_page_loads_nothing_and_escapes_everything(paths):
    page = paths[0].read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(", page)
    assert "&lt;script&gt;" in page


def test_every_section_is_there(paths):
    page = paths[0].read_text(encoding="utf-8")
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    wanted = [
        "Throughput",
        "Auto against",
        "Acceptance",
        "Where the time goes",
        "What auto did",
        "Latency",
        "Fingerprint",
    ]
    assert all(any(head.startswith(name) for head in heads) for name in wanted)
    assert page.index("pays up to C = ") < page.index("<h2>Throughput")
    assert "Small greedy models repeat themselves" in page


def test_charts_are_svg_with_letters_and_the_crossover(paths):
    charts = re.findall(r"<figure>(<svg.*?</svg>)</figure>", paths[0].read_text(encoding="utf-8"), re.S)
    assert len(charts) == 3 + 2 + 3 + 3
    for chart in charts:
        ET.fromstring(chart)
    assert all("C = " in chart and "output tok/s" in chart for chart in charts[:3])


def test_the_dark_page_knows_the_inks_of_the_charts(paths):
    page = paths[0].read_text(encoding="utf-8")
    for ink in (theme.INK, theme.MUTED, theme.AUTO, *theme.FIXED[:2]):
        assert f'[fill="{ink}"]' in page.split("prefers-color-scheme: dark")[1]


def test_summaries_agree_with_the_page(paths):
    summary = json.loads(paths[3].read_text(encoding="utf-8"))
    assert summary["verdict"][0] in paths[2].read_text(encoding="utf-8")
    crossing = next(c for c in summary["crossovers"] if c["arm"].startswith("always") and c["domain"] == "coding")
    assert crossing["answer"] == "number" and crossing["low"] < crossing["value"] < crossing["high"]
    assert summary["auto"]["held"] and summary["auto"]["failed_cells"] == []


def test_one_block_one_arm_still_gives_a_page(tmp_path):
    plan = simulated_plan(arms=("-",), blocks=1).model_copy(update={"concurrency": (1,)})
    page = write_report(write_simulated_run(tmp_path, plan=plan), tmp_path / "report.html")[0].read_text(
        encoding="utf-8"
    )
    assert "nothing to compare it with" in page


def test_an_empty_run_is_refused(tmp_path):
    record = RunRecord(run_id="r", started_at="", plan=simulated_plan(), fingerprint=Fingerprint(dimensions={}))
    path = RunWriter(tmp_path, record).finish("failed")
    with pytest.raises(LabError, match="no block was finished"):
        write_report(path, tmp_path / "report.html")
