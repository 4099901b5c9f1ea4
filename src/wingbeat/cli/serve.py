"""wingbeat serve: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Literal

import tyro

from wingbeat.cli.starting import Stages
from wingbeat.engine.config import EngineConfig
from wingbeat.engine.metrics import EngineInfo
from wingbeat.errors import ConfigError

Repeatable = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
"""`--flag a b` and `--flag a --flag b` both give a and b."""
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
GRACE_SECONDS = 10
"""How long running requests may go on after SIGTERM or Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Serves a model over HTTP, as OpenAI's API does."""

    model_tag: Annotated[str | None, tyro.conf.Positional] = None
    """The model, as --model takes it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface (set --api-key then)."""
    port: int = 8000
    """0 takes a free one; it is printed."""
    api_key: Repeatable = ()
    """Keys that clients must bring one of; none: everybody is let in."""
    served_model_name: Repeatable = ()
    """Names the model answers to; its own when none is given."""
    max_body_bytes: int = 10_000_000
    """Longest request body."""
    uvicorn_log_level: Annotated[LogLevel, tyro.conf.arg(aliases=["--log-level"])] = "warning"
    """info logs every request."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "an integer from 0 to 65535")
        if self.max_body_bytes < 1:
            raise ConfigError("max_body_bytes", self.max_body_bytes, "an integer >= 1")
        if not all(self.api_keys):
            raise ConfigError("api_key", "", "non-empty keys")
        if self.model_tag is not None and self.engine.model not in (self.model_tag, "smollm2"):
            raise ConfigError("model", self.engine.model, f"one model, not also {self.model_tag!r}")

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self.api_key))

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self.served_model_name))

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's settings, with the model wherever it was named."""
        return self.engine if self.model_tag is None else replace(self.engine, model=self.model_tag)


def run(config: Serve) -> int:
    """Serves until SIGTERM or Ctrl-C. Raises ConfigError or CheckpointError before anything is served."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The address comes first: nobody should wait for a model to learn that the port is taken.
    with closing(listen(config.host, config.port)) as listener:
        return _serve(config, listener)


def _serve(config: Serve, listener: socket.socket) -> int:
    import uvicorn

    from wingbeat.engine.engine import Engine
    from wingbeat.server.app import ServerOptions, build_app

    # The engine's thread gets the interpreter back sooner while answers are being written.
    sys.setswitchinterval(0.001)
    with Stages() as tell:
        engine = Engine.from_config(config.engine_config, tell)
        engine.grammars.prepare()
    options = ServerOptions(
        model_names=config.model_names, api_keys=config.api_keys, max_body_bytes=config.max_body_bytes
    )
    settings = uvicorn.Config(
        build_app(engine, options),
        log_level=config.uvicorn_log_level,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=75,
    )
    print(banner(engine.info(), engine.speculation().policy), file=sys.stderr)
    names = ", ".join(config.model_names) or engine.model_name
    print(f"serving {names} on {_address(listener)}", file=sys.stderr, flush=True)
    server = uvicorn.Server(settings)
    # The server stops on these by itself, then raises them again for whoever had them before: a stop asked for is no
    # failure, so that is nobody.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def banner(info: EngineInfo, policy: str) -> str:
    """What the settings came to on this machine: model, drafter, kernels, policy, pages."""
    policy = policy if info.drafter is not None else f"{policy}: nothing to speculate with"
    rows = {
        "model": f"{info.model} ({info.architecture}, {info.dtype}), context {info.max_model_len} tokens",
        "drafter": info.drafter or "none",
        "kernels": f"{info.kernels} on {info.device}, {info.num_threads} threads",
        "policy": policy,
        "pages": f"{info.num_pages} of {info.page_size} tokens ({info.num_pages * info.page_size} tokens of K/V)",
    }
    return "\n".join(f"  {name:<8} {value}" for name, value in rows.items())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError when the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"{host}:{port}", f"a free address of this machine ({error.strerror})") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
