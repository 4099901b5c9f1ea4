"""Comparisons of runs: what is refused, what is paired, what fails."""

from __future__ import annotations

import pytest

from wingbeat.cli.main import main
from wingbeat.errors import ConfigError, LabError
from wingbeat.lab.compare import compare_runs
from wingbeat.lab.ledger import read_run
from wingbeat.lab.test_simulated import simulated_plan, write_simulated_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_simulated_run(root, "a", facts={"version": "1"})
    write_simulated_run(root, "b", facts={"version": "2"}, speedup=0.9)
    write_simulated_run(root, "same", facts={"version": "2"})
    write_simulated_run(
        root, "hot", facts={"version": "2"}, plan=simulated_plan().model_copy(update={"temperature": 0.7})
    )
    write_simulated_run(root, "blind", facts={"version": "2", "dtype": "unknown"})
    write_simulated_run(root, "longer", facts={"version": "2"}, plan=simulated_plan(blocks=2))
    return root


def compare(root, a, b, *flags):
    return main(["compare", str(root / a), str(root / b), "--factor", "engine_version", *flags])


def test_the_factor_is_measured_with_an_interval(root):
    found = compare_runs(read_run(root / "a"), read_run(root / "b"), "engine_version")
    assert found.paired and not found.confounders and found.values == ("1", "2")
    for arm in found.arms:
        assert arm.overall.low < arm.overall.value < arm.overall.high
        assert arm.overall.value == pytest.approx(0.9, abs=0.02)


def test_every_other_difference_is_named_and_refused(root, capsys):
    assert compare(root, "a", "hot") == 3
    out = capsys.readouterr()
    assert "confounded by" in out.err and "sampling (temperature=0.0" in out.err and out.out == ""


def test_unknown_equals_nothing(root, capsys):
    assert compare(root, "blind", "blind") == 3
    assert "dtype (unknown in both runs" in capsys.readouterr().err


def test_a_difference_is_allowed_only_with_a_reason(root, capsys):
    assert compare(root, "a", "hot", "--allow", "sampling") == 2
    assert compare(root, "a", "hot", "--allow", "sampling", "--because", "both are valid") == 0
    out = capsys.readouterr().out
    assert "because both are valid" in out and "ratio without interval" in out and "[" not in out.split("off: B / A")[1]


def test_unpaired_runs_have_no_interval(root):
    found = compare_runs(read_run(root / "a"), read_run(root / "longer"), "engine_version")
    assert not found.paired and [d.dimension for d in found.flagged] == ["block_load"]
    assert all(arm.overall.low is None for arm in found.arms)
    assert found.arms[0].overall.value == pytest.approx(1.0, abs=0.03)


def test_a_regression_fails_and_noise_does_not(root, capsys):
    assert compare(root, "a", "b", "--fail-below", "0.97") == 3
    assert "regression: off is below 0.97" in capsys.readouterr().err
    assert compare(root, "a", "same", "--fail-below", "0.97") == 0


def test_unknown_dimensions_and_disjoint_runs_are_errors(root, tmp_path):
    a = read_run(root / "a")
    with pytest.raises(ConfigError, match="did you mean 'engine_version'"):
        compare_runs(a, a, "engine_versio")
    other = read_run(write_simulated_run(tmp_path, plan=simulated_plan(arms=("always:chain(2)",), blocks=1)))
    with pytest.raises(LabError, match="share no arm"):
        compare_runs(a, other, "arms", allow=("engine_version",))
