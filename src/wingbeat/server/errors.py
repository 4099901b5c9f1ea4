"""Every error leaves as {"error": {"message", "type", "param", "code"}}, as OpenAI's clients expect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from wingbeat.errors import CapacityError, ConfigError, EngineError, RequestError
from wingbeat.server.wire import Json

log = logging.getLogger(__name__)
UNREADABLE = "There was an error parsing the body"
"""FastAPI's words for a body whose reading failed in another way than by a syntax error."""
TYPES = {401: "authentication_error", 404: "not_found_error"}


class BodyTooLargeError(HTTPException):
    """A body without a length grew over the limit. An HTTPException, since FastAPI turns others into its own."""

    def __init__(self, message: str) -> None:
        super().__init__(413, message)


class UnknownModelError(RequestError):
    """The model asked for is not the one served."""

    status = 404


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    """The JSON of one error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def too_large(message: str) -> Json:
    """The answer to a body over the limit; what is left of it is not read."""
    return error_response(413, message, param="body", code="request_too_large", headers={"Connection": "close"})


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Json:
    return Json(error_body(status, message, param=param, code=code), status, headers=headers)


def response_of(error: Exception) -> Json:
    """What the client hears about an exception raised while its request was handled."""
    if isinstance(error, UnknownModelError):
        return error_response(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError | ConfigError):
        status = error.status if isinstance(error, RequestError) else 400
        code = "context_length_exceeded" if isinstance(error, CapacityError) and error.field == "prompt" else None
        return error_response(status, str(error), param=error.field, code=code)
    if isinstance(error, EngineError):
        return error_response(503, str(error), code="engine_error")
    log.error("a request failed unexpectedly", exc_info=error)
    return error_response(500, "the server failed on this request; its log says why", code="internal_error")


def install(app: FastAPI) -> None:
    """Makes every error of the app leave in the one shape."""

    async def on_error(_: Request, error: Exception) -> Json:
        return response_of(error)

    async def on_http(request: Request, error: Exception) -> Json:
        http = cast(HTTPException, error)
        if http.detail == UNREADABLE:
            return error_response(400, "the body is not valid JSON: it is not UTF-8, or nested too deeply")
        if isinstance(error, BodyTooLargeError):
            return too_large(http.detail)
        message = f"{request.method} {request.url.path}: {http.detail}"
        return error_response(http.status_code, message, headers=dict(http.headers or {}))

    async def on_invalid(_: Request, error: Exception) -> Json:
        message, param = describe(cast(RequestValidationError, error).errors())
        return error_response(400, message, param=param)

    for kind in (RequestError, ConfigError, EngineError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)


def describe(errors: Sequence[object]) -> tuple[str, str | None]:
    """The first validation error as (message, field), in the form of our own: field=value is not valid: allowed."""
    first = cast(dict[str, object], errors[0])
    if first.get("type") == "json_invalid":
        detail = cast(dict[str, object], first.get("ctx") or {}).get("error")
        return f"the body is not valid JSON: {detail}", None
    location = [str(part) for part in cast(Sequence[object], first.get("loc") or ()) if part != "body"]
    # A union reports one error per alternative, with the alternative's type in the path; the field is what matters.
    field = location[0] if location else None
    if not location:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    path = _path(location)
    if first.get("type") == "missing":
        return f"{path} is required", field
    allowed = sorted({str(cast(dict[str, object], e).get("msg")) for e in errors if _is_about(e, field)})
    return f"{path}={_shown(first.get('input'))} is not valid: {'; or '.join(allowed)}", field


def _path(location: list[str]) -> str:
    """messages, 0, role -> messages[0].role; parts that name a type of a union are left out."""
    path = location[0]
    for part in location[1:]:
        if part.isdigit():
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list", "dict"):
            path += f".{part}"
    return path


def _is_about(error: object, field: str | None) -> bool:
    location = [p for p in cast(Sequence[object], cast(dict[str, object], error).get("loc") or ()) if p != "body"]
    return bool(location) and location[0] == field


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
