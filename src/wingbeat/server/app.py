"""build_app: the routes over one engine, with keys and body limit in front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from wingbeat import __version__
from wingbeat.server.auth import ApiKeys
from wingbeat.server.body_limit import BodyLimit
from wingbeat.server.bridge import EngineBridge, EngineLike
from wingbeat.server.chat import chat_router
from wingbeat.server.completions import completion_router
from wingbeat.server.context import ServerContext
from wingbeat.server.control import control_router
from wingbeat.server.errors import install
from wingbeat.server.prometheus import Latencies

MAX_BODY_BYTES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the HTTP side is told."""

    model_names: tuple[str, ...] = ()
    """Names answered to; the engine's own when empty."""
    api_keys: Sequence[str] = ()
    """Keys admitted; everybody when empty."""
    max_body_bytes: int = MAX_BODY_BYTES


def build_app(engine: EngineLike, options: ServerOptions | None = None) -> FastAPI:
    """An ASGI app that owns the engine's thread from start-up to shutdown."""
    options = options or ServerOptions()
    latencies = CollectorRegistry()
    bridge = EngineBridge(engine, Latencies(latencies))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.start()
        yield
        await bridge.close()

    app = FastAPI(title="Wingbeat", version=__version__, lifespan=lifespan)
    server = ServerContext(bridge=bridge, model_names=options.model_names or (engine.model_name,))
    for router in (chat_router(server), completion_router(server), control_router(server, latencies)):
        app.include_router(router)
    install(app)
    app.state.bridge = bridge
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    app.add_middleware(ApiKeys, keys=options.api_keys)  # added last, so it comes first
    return app
