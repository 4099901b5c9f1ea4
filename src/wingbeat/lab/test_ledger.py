"""Run directories: nothing half-visible, nothing finished lost, nothing foreign read."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.errors import LabError
from wingbeat.lab.ledger import RunWriter, list_runs, new_run_id, read_run
from wingbeat.lab.record import BlockRecord, Fingerprint, RequestRecord, RunPlan, RunRecord

PLAN = RunPlan(
    kind="parallel",
    url="http://h",
    model="m",
    suites=("coding@1:0",),
    concurrency=(1,),
    arms=("off",),
    blocks=1,
    requests_per_block=2,
    seconds_per_block=None,
    max_tokens=8,
    temperature=0.0,
    top_p=1.0,
    seed=0,
    ignore_eos=False,
    prefix_cache="warm",
)


def record(run_id: str = "r1") -> RunRecord:
    fingerprint = Fingerprint(dimensions={"dtype": "bf16"})
    return RunRecord(run_id=run_id, started_at="2026-01-01T00:00:00Z", plan=PLAN, fingerprint=fingerprint)


def request(index: int) -> RequestRecord:
    return RequestRecord(
        domain="coding",
        concurrency=1,
        block=0,
        arm="off",
        slot=0,
        index=index,
        prompt_id=f"p{index}",
        seed=index,
        sent_s=1.0,
        lateness_s=0.0,
        first_s=1.5,
        last_s=2.5,
        num_tokens=11,
        progress=((1.5, 1), (2.5, 11)),
        error="caf\u00e9" if index == 1 else None,
    )


BLOCK = BlockRecord(
    domain="coding",
    concurrency=1,
    block=0,
    arm="off",
    order=0,
    started_s=0.0,
    window_s=(1.0, 3.0),
    window_tokens=50.0,
    total_s=4.0,
    total_tokens=60,
    num_requests=2,
    num_errors=0,
    num_missing_usage=0,
)


def test_a_finished_run_reads_back_equal(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, record())
    for index in range(2):
        writer.add_request(request(index))
    writer.add_block(BLOCK)
    path = writer.finish("finished", ("a note",))
    run = read_run(path)
    assert path == tmp_path / "r1"
    assert run.requests == (request(0), request(1))
    assert run.blocks == (BLOCK,)
    assert run.complete
    assert run.record.notes == ("a note",)
    assert run.record.finished_at is not None
    assert not list(tmp_path.glob(".*"))


def test_a_crash_leaves_a_partial_run_with_all_that_finished(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, record())
    writer.add_request(request(0))
    writer.add_block(BLOCK)
    partial = tmp_path / ".r1.partial"
    with (partial / "requests.jsonl").open("a", encoding="ascii") as file:
        file.write('{"domain": "cod')  # the machine went down here
    run = read_run(partial)
    assert not run.complete
    assert len(run.requests) == 1
    assert run.blocks == (BLOCK,)
    assert not (tmp_path / "r1").exists()
    assert [r.status for r in list_runs(tmp_path)] == ["running"]
    writer.finish("failed")


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, record())
    writer.add_block(BLOCK)
    path = writer.finish("finished")
    (path / "blocks.jsonl").write_text('{"domain": "coding"}\n', encoding="ascii")
    with pytest.raises(LabError, match=r"blocks\.jsonl: concurrency"):
        read_run(path)


def test_a_newer_format_and_a_foreign_directory_are_refused(tmp_path: Path) -> None:
    path = RunWriter(tmp_path, record()).finish("finished")
    head = path / "run.json"
    head.write_text(head.read_text().replace('"format_version": 1', '"format_version": 99'), encoding="utf-8")
    with pytest.raises(LabError, match="format_version=99"):
        read_run(path)
    with pytest.raises(LabError, match=r"no run\.json"):
        read_run(tmp_path)


def test_runs_are_never_overwritten_and_listed_in_order(tmp_path: Path) -> None:
    RunWriter(tmp_path, record("b")).finish("finished")
    RunWriter(tmp_path, record("a")).finish("failed")
    with pytest.raises(LabError, match="exists already"):
        RunWriter(tmp_path, record("a"))
    assert [r.run_id for r in list_runs(tmp_path)] == ["a", "b"]
    assert "a-b" in new_run_id("parallel", "a/b")


def test_the_metrics_of_a_request_are_their_formulas() -> None:
    r = request(0)
    assert r.ttft_s == 0.5
    assert r.e2e_s == 1.5
    assert r.tpot_s == pytest.approx(1.0 / 10)
    assert r.model_copy(update={"cut": True}).e2e_s is None
    assert r.model_copy(update={"num_tokens": 1}).tpot_s is None
    assert BLOCK.tokens_per_s == 25.0
    assert BLOCK.whole_tokens_per_s == 15.0
