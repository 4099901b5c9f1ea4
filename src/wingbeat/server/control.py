"""What is not inference: models, health, version, facts, metrics, and the steering of speculation."""

from __future__ import annotations

import hashlib
import platform
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from wingbeat import __version__
from wingbeat.engine.metrics import SpeculationState
from wingbeat.server.bridge import EngineLike
from wingbeat.server.context import ServerContext
from wingbeat.server.prometheus import exposition
from wingbeat.server.schema import PolicyBody
from wingbeat.server.wire import Json

JsonObject = dict[str, object]
PACKAGES = ("torch", "numba", "numpy", "transformers", "tokenizers", "llguidance")


def control_router(server: ServerContext, latencies: CollectorRegistry) -> APIRouter:
    router = APIRouter()
    bridge = server.bridge

    @router.get("/v1/models")
    async def models() -> JsonObject:
        """The names served."""
        return {"object": "list", "data": [_model_record(server, name) for name in server.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JsonObject:
        """One of them."""
        return _model_record(server, server.model_named(name))

    @router.get("/health")
    async def health() -> Json:
        """200 while the engine serves; 503 and the reason when it has stopped."""
        failure = bridge.failure
        body: JsonObject = {"status": "ok" if failure is None else "failed", "active_requests": bridge.num_active}
        return Json(body | ({} if failure is None else {"error": failure}), 200 if failure is None else 503)

    @router.get("/version")
    async def version_of() -> JsonObject:
        return {"version": __version__}

    @router.get("/server_info")
    async def server_info() -> JsonObject:
        """Facts that tell this server apart from another in a comparison of measurements."""
        info = await bridge.call(lambda engine: engine.info())
        return {**asdict(info), **_environment(), "chat_template_hash": _template_hash(server)}

    @router.get("/metrics")
    async def metrics() -> Response:
        snapshot = await bridge.call(lambda engine: deepcopy(engine.metrics()))  # the engine goes on counting
        return Response(exposition(latencies, snapshot, server.model_names[0]), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/speculation")
    async def speculation() -> JsonObject:
        """The policy, its newest plan, and what it believes."""
        return speculation_record(await bridge.call(lambda engine: engine.speculation()))

    @router.post("/v1/speculation")
    async def steer(body: PolicyBody) -> JsonObject:
        """Changes the policy from the next step on."""

        def change(engine: EngineLike) -> JsonObject:
            engine.set_policy(body.policy)
            return speculation_record(engine.speculation())

        return await bridge.call(change)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JsonObject:
        """Forgets the reusable pages that no running request holds, so that a measurement starts cold."""
        await bridge.call(lambda engine: engine.reset_prefix_cache())
        return {"status": "ok"}

    return router


def speculation_record(state: SpeculationState) -> JsonObject:
    """The state as JSON, with the newest plan in an object of its own."""
    record: JsonObject = asdict(state)
    plan = {"text": record.pop("plan"), **{name: record.pop(name) for name in ("depth", "topk", "rows")}}
    return {"policy": record.pop("policy"), "plan": plan, **record}


def _model_record(server: ServerContext, name: str) -> JsonObject:
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "wingbeat",
        "max_model_len": server.max_model_len,
    }


def _environment() -> JsonObject:
    return {
        "engine": "wingbeat",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "packages": {name: found for name in PACKAGES if (found := _version_of(name)) is not None},
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _template_hash(server: ServerContext) -> str | None:
    template = server.tokenizer.template
    if template is None:
        return None
    try:
        shown = template.render([{"role": "user", "content": "hash"}])
    except Exception:  # a template that refuses even this is told apart by its refusal
        shown = "refused"
    return hashlib.sha256(shown.encode()).hexdigest()[:16]
