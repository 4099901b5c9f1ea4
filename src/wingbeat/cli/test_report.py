"""The report command."""

from __future__ import annotations

from wingbeat.cli.main import main
from wingbeat.lab.test_simulated import simulated_plan, write_simulated_run


def test_the_command_writes_beside_the_run(tmp_path, capsys):
    run = write_simulated_run(tmp_path, plan=simulated_plan(blocks=1))
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr()
    assert str(run / "report.html") in out.out and (run / "report.png").is_file()
    assert "coding: speculation" in out.err
    assert main(["report", str(tmp_path)]) == 1
