from __future__ import annotations

import re
import time

import pytest

from wingbeat.cli.starting import Stages


def test_stages_are_said_with_reminders_in_long_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(every_s=0.1) as tell:
        tell("reading")
        tell("loading")
        deadline = time.monotonic() + 5
        said = ""
        while said.count("still") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        tell("timing")
    lines = (said + capsys.readouterr().err).splitlines()
    assert [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in lines] == [
        "reading",
        "loading",
        "still loading",
        "still loading",
        "timing",
    ]
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing is said once it has started"


def test_a_failed_start_is_not_hidden() -> None:
    stages = Stages(every_s=0.05)
    with pytest.raises(ZeroDivisionError), stages:
        print(1 / 0)
    assert not stages._thread.is_alive()
