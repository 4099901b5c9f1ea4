"""Json: the answer of every route. Model text and echoed values may hold what UTF-8 cannot spell; it becomes '?'."""

from __future__ import annotations

import json

from starlette.responses import Response


class Json(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json_bytes(content)


def json_bytes(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
