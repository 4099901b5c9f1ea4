"""Pending: one step between the moment it is decided and the moment it is read."""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.engine.sequence import Sequence
from wingbeat.engine.step import StepInput
from wingbeat.spec.block import Prefill
from wingbeat.spec.plan import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A prepared step: what to run and whose results it brings."""

    step: StepInput
    decode: list[Sequence]
    chunks: list[tuple[Sequence, Prefill]]
    rule: Rule
    bounds: list[int]
    """Most tokens the step adds to each sequence of decode + chunks."""
    total_context: int

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decode, *(sequence for sequence, _ in self.chunks)]
