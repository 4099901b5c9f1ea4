"""ServerContext: what every route needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time

from wingbeat.server.bridge import EngineBridge
from wingbeat.server.errors import UnknownModelError
from wingbeat.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """The engine behind its bridge, and the names it answers to."""

    bridge: EngineBridge
    model_names: tuple[str, ...]
    started: int = field(default_factory=lambda: int(time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.bridge.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.bridge.engine.max_model_len

    def model_named(self, asked: str | None) -> str:
        """The served name asked for; the first when none was. UnknownModelError for another."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise UnknownModelError("model", asked, f"served here: {', '.join(self.model_names)}")
        return asked
