"""A server as a child process: ready, dead on arrival, never ready; stopped in every case."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest

from wingbeat.errors import LabError
from wingbeat.lab.subject import free_port, subject

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_enters_when_healthy_and_stops_at_the_end(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subject([sys.executable, "-c", SERVER, str(port)], url, tmp_path / "server.log", timeout_s=20):
        assert urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=2)


def test_is_stopped_when_the_block_fails(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        pytest.raises(RuntimeError, match="inside"),
        subject([sys.executable, "-c", SERVER, str(port)], url, tmp_path / "server.log", timeout_s=20),
    ):
        raise RuntimeError("inside")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=2)


def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(LabError, match=r"(?s)exit code 3.*no such model"),
        subject(command, "http://127.0.0.1:9", tmp_path / "logs" / "server.log", timeout_s=20),
    ):
        pytest.fail("must not be entered")


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    told: list[float] = []
    with (
        pytest.raises(LabError, match=r"not ready after 1 s"),
        subject(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            "http://127.0.0.1:9",
            tmp_path / "server.log",
            timeout_s=0.6,
            tell=told.append,
        ),
    ):
        pytest.fail("must not be entered")
    assert told
