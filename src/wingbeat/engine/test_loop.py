"""What the overlapped loop owes while a step is unread."""

from __future__ import annotations

from threading import Event

import pytest
from rig import engine

from wingbeat.engine.engine import Engine
from wingbeat.engine.pending import Pending
from wingbeat.engine.step import StepInput, StepResult
from wingbeat.types import ChoiceDelta, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def finish(built: Engine) -> list[ChoiceDelta]:
    deltas = []
    while built.has_work():
        deltas += built.step()
    return deltas


def test_there_is_work_until_every_step_is_read() -> None:
    """Also when everything the step was for has been aborted, here in the middle of its prompt."""
    with engine(loop="overlapped", max_rows=8) as built:
        built.add(Request(request_id="long", prompt_token_ids=tuple(range(10, 50)), params=GREEDY))
        assert built.step() == []
        built.abort("long")
        assert built._loop.has_unread and built.has_work()
        assert finish(built) == []
        assert not built._loop.has_unread and built._prefix.pages.num_held == 0


def test_a_lane_is_not_given_away_under_an_unread_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt aborted between two chunks: the chunk in flight must not advance the next request's lengths."""
    request = Request(request_id="next", prompt_token_ids=tuple(range(60, 80)), params=GREEDY)
    with engine(lanes=1, max_rows=8) as plain:
        plain.add(request)
        expected = [token for delta in finish(plain) for token in delta.token_ids]
    with engine(loop="overlapped", lanes=1, max_rows=8) as built:
        prepared = Event()
        run, prepare = built._core.stepper.run, built._core.prepare

        def run_late(step: StepInput) -> StepResult:
            prepared.wait()
            return run(step)

        def prepare_first(*, unread: bool) -> Pending | None:
            try:
                return prepare(unread=unread)
            finally:
                (prepared.set if unread else prepared.clear)()

        monkeypatch.setattr(built._core.stepper, "run", run_late)
        monkeypatch.setattr(built._core, "prepare", prepare_first)
        built.add(Request(request_id="long", prompt_token_ids=tuple(range(10, 50)), params=GREEDY))
        built.step()
        built.abort("long")
        built.add(request)
        found = [token for delta in finish(built) for token in delta.token_ids]
    assert found == expected
