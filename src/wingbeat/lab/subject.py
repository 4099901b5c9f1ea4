"""The server under test as a child process: started, waited for, and always stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wingbeat.errors import LabError

POLL_S = 0.2
STOP_S = 15.0
TAIL_LINES = 25


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def subject(
    command: Sequence[str], url: str, log: Path, *, timeout_s: float, tell: Callable[[float], None] = lambda s: None
) -> Iterator[None]:
    """Runs `command` until the block ends; enters when `url`/health answers. LabError holds the log's last lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink, _termination_unwinds():
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        try:
            _wait_healthy(process, url, log, timeout_s, tell)
            yield
        finally:
            _stop(process)


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """SIGTERM ends this process through its `finally` clauses, so that the child does not outlive it."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can only be set from the main thread
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float, tell: Callable[[float], None]
) -> None:
    started = time.monotonic()
    while (waited := time.monotonic() - started) < timeout_s:
        if process.poll() is not None:
            raise LabError(f"the server ended with exit code {process.returncode} before it was ready\n{tail(log)}")
        if _healthy(url):
            return
        tell(waited)
        time.sleep(POLL_S)
    raise LabError(f"the server was not ready after {timeout_s:.0f} s\n{tail(log)}")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks first, insists after a while; returns when the process is gone."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def tail(log: Path) -> str:
    """The log's last lines, indented, with the log's name."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"last lines of {log}:", *(f"  {line}" for line in lines)])
