"""From records to words, on a simulated run and on records made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from wingbeat.lab.best_arm import BestArmTest, CellVerdict
from wingbeat.lab.judge import AUTO_BOUND, caveats, judge_run
from wingbeat.lab.ledger import Run, read_run
from wingbeat.lab.metrics import acceptance, cell_figures, differing_outputs, latency, speeds, time_splits
from wingbeat.lab.stats import Ratio
from wingbeat.lab.test_simulated import (
    DOMAINS,
    POINTS,
    depth_of,
    expected_tokens,
    simulated_plan,
    step_seconds,
    write_simulated_run,
)
from wingbeat.lab.verdict import auto_line, verdict_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return read_run(write_simulated_run(tmp_path_factory.mktemp("runs"), noise=0.01))


def with_blocks(run: Run, change) -> Run:
    blocks = tuple(b.model_copy(update=change(b)) for b in run.blocks)
    return Run(path=run.path, record=run.record, requests=run.requests, blocks=blocks)


def true_ratio(accept: float, concurrency: int) -> float:
    def rate(depth):
        return expected_tokens(accept, depth) / sum(
            step_seconds(concurrency * (depth + 1), depth, concurrency).values()
        )

    return rate(3) / rate(0)


def test_crossovers_are_where_the_law_puts_them(run):
    arm = next(a for a in judge_run(run).arms if a.arm.startswith("always"))
    for domain, accept in DOMAINS.items():
        logs = np.log([true_ratio(accept, c) for c in POINTS])
        i = int((logs > 0).sum()) - 1
        truth = 2 ** (i + logs[i] / (logs[i] - logs[i + 1]))
        assert arm.crossovers[domain].value == pytest.approx(truth, rel=0.08)


def test_the_verdict_names_domain_plan_and_auto(run):
    lines = verdict_lines(run)
    assert lines[0].startswith("coding: speculation (chain(3)) pays up to C = ")
    assert sum(line.startswith("auto against the better of off and chain(3): 1.0") for line in lines) == 1
    assert "no cell is surely below 0.97" in " ".join(lines)


def test_auto_that_loses_is_told_with_its_cell(run):
    def slow(block):
        hit = block.arm == "auto" and (block.domain, block.concurrency) == ("coding", 1)
        return {"window_tokens": block.window_tokens * 0.8} if hit else {}

    assert "surely below 0.97 in coding C=1" in " ".join(verdict_lines(with_blocks(run, slow)))


@pytest.mark.parametrize(
    ("pooled", "cell", "held", "said"),
    [
        (0.971, Ratio(0.95, 0.91, 0.98, 4), True, "no cell is surely below 0.97"),
        (0.969, Ratio(0.95, 0.91, 0.98, 4), False, "all of them together are below it"),
        (0.99, Ratio(0.95, 0.94, 0.96, 4), False, "surely below 0.97 in coding C=8"),
    ],
)
def test_auto_needs_the_pooled_ratio_and_every_cell(pooled, cell, held, said):
    cells = {("coding", 8): CellVerdict(ratio=cell, p_below=0.5, rivals=("off",))}
    ratio = Ratio(pooled, pooled - 0.02, pooled + 0.02, 4)
    test = BestArmTest(candidate="auto", rivals=("off", "chain(3)"), bound=AUTO_BOUND, pooled=ratio, cells=cells)
    assert test.held == held
    assert auto_line(test).endswith(said)


def test_invalid_blocks_count_for_nothing_and_are_told(run):
    def spoil(block):
        return {"invalid": ("client was the bottleneck",), "window_tokens": 1e9} if block.block == 0 else {}

    spoiled = with_blocks(run, spoil)
    assert all(0 not in blocks for blocks in speeds(spoiled)["off"].values())
    assert max(f.tokens_per_s for f in cell_figures(spoiled)) < 1e4
    assert any("54 of 216 blocks are invalid" in text and "bottleneck" in text for text in caveats(spoiled))


def test_texts_that_differ_are_told(run):
    requests = tuple(
        r.model_copy(update={"text_sha": "x"}) if r.arm == "auto" and r.index == 0 else r for r in run.requests
    )
    changed = Run(path=run.path, record=run.record, requests=requests, blocks=run.blocks)
    differ, compared = differing_outputs(changed, "auto", "off")
    assert differ == len(DOMAINS) * len(POINTS) * 4 < compared
    assert any("texts of auto differ from those of off" in text for text in caveats(changed))
    assert differing_outputs(run, "auto", "off")[0] == 0


def test_a_run_without_baseline_says_so(tmp_path):
    alone = read_run(write_simulated_run(tmp_path, plan=simulated_plan(arms=("always:chain(3)",), blocks=1)))
    assert "no arm ran without speculation" in verdict_lines(alone)[0]


def test_accept_len_and_acceptance_follow_the_law(run):
    by_cell = {(f.arm, f.domain, f.concurrency): f for f in cell_figures(run)}
    assert by_cell["off", "coding", 8].accept_len == pytest.approx(1.0, abs=0.01)
    assert by_cell["always:chain(3)", "coding", 8].accept_len == pytest.approx(expected_tokens(0.78, 3), abs=0.01)
    rows = [r for r in acceptance(run) if (r.arm, r.domain) == ("always:chain(3)", "agentic")]
    assert [r.conditional for r in rows] == pytest.approx([0.66, 0.66 * 0.92, 0.66 * 0.92**2], abs=0.005)
    mixed = [r.conditional for r in acceptance(run) if (r.arm, r.domain) == ("auto", "agentic")]
    assert mixed[:2] == pytest.approx([0.66, 0.66 * 0.92], abs=0.02)
    assert rows[2].unconditional == pytest.approx(0.66**3 * 0.92**3, abs=0.005)


def test_positions_this_arm_never_drafted_have_no_acceptance(run):
    """The server's counters reach as deep as any arm ever drafted."""

    def deeper(block):
        use = block.speculation
        zeros = (0,) * 5
        deep = {"accepted_per_pos": use.accepted_per_pos + zeros, "drafted_per_pos": use.drafted_per_pos + zeros}
        return {"speculation": use.model_copy(update=deep)}

    rows = [r for r in acceptance(with_blocks(run, deeper)) if (r.arm, r.domain) == ("always:chain(3)", "agentic")]
    assert [r.position for r in rows] == [1, 2, 3]


def test_time_shares_add_up_and_match(run):
    splits = {(s.arm, s.concurrency): dict(s.shares) for s in time_splits(run)}
    assert all(sum(shares.values()) == pytest.approx(1) for shares in splits.values())
    parts = step_seconds(32, 3, 8)
    assert splits["always:chain(3)", 8]["draft"] == pytest.approx(parts["draft"] / sum(parts.values()), abs=0.01)
    assert splits["off", 1]["draft"] == 0


def test_percentiles_below_the_floor_are_refused():
    assert latency([0.1] * 63).p90 is None
    assert latency([0.1] * 64 + [None]).p90 == 0.1
    assert (latency([0.1] * 661).p99, latency([0.1] * 662).p99) == (None, 0.1)


def test_auto_of_the_law_stops_in_time():
    assert depth_of("auto", 0.78, 1) > 2
    assert depth_of("auto", 0.48, 32) == 0
