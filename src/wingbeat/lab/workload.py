"""What is run, in which order: cells, blocks, arms and the prompts of each block. Pure.

Block b of a cell (domain x concurrency) runs every arm once, in the order A B C, the next block in the order C B A,
and so on, so that a drift of the machine meets all arms alike. Within a block all arms send the same prompts in the
same order with the same seeds; from block to block the order is rotated, so that no cell lives on the first few
prompts of a suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wingbeat.lab.suites import Prompt, Suite

WARM_UP_PROMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long one block of one arm lasts: a number of requests, or seconds, after which requests are cut."""

    requests: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One arm in one block of one cell."""

    suite: Suite
    concurrency: int
    block: int
    arm: str
    order: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All turns of a run."""

    suites: tuple[Suite, ...]
    concurrency: tuple[int, ...]
    arms: tuple[str, ...]
    blocks: int
    load: Load
    seconds_by_concurrency: tuple[tuple[int, float], ...] = ()
    """Overrides `load.seconds` per concurrency: more streams need longer to show a steady window."""

    def turns(self) -> Iterator[Turn]:
        """Blocks outermost: a run that is interrupted has measured every cell about equally often."""
        for block in range(self.blocks):
            arms = self.arms if block % 2 == 0 else self.arms[::-1]
            for suite in self.suites:
                for concurrency in self.concurrency:
                    for order, arm in enumerate(arms):
                        load = self.load_at(concurrency)
                        yield Turn(suite=suite, concurrency=concurrency, block=block, arm=arm, order=order, load=load)

    def load_at(self, concurrency: int) -> Load:
        seconds = dict(self.seconds_by_concurrency).get(concurrency, self.load.seconds)
        requests = self.load.requests
        # Fewer than two requests per slot would be all ramp and drain.
        return Load(requests=None if requests is None else max(requests, 2 * concurrency), seconds=seconds)

    @property
    def num_turns(self) -> int:
        return self.blocks * len(self.suites) * len(self.concurrency) * len(self.arms)


def split_warm_up(suite: Suite) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(prompts for warm-up, prompts to measure): disjoint, unless the suite is too small to spare any."""
    if len(suite.prompts) <= 2 * WARM_UP_PROMPTS:
        return suite.prompts, suite.prompts
    return suite.prompts[:WARM_UP_PROMPTS], suite.prompts[WARM_UP_PROMPTS:]


def prompt_at(prompts: tuple[Prompt, ...], block: int, concurrency: int, index: int) -> Prompt:
    """Prompt number `index` of a block: the suite's order, rotated by block and cell, the same in every arm."""
    # 7 and 3 are coprime to 62, the number of prompts measured in a shipped suite: rotations do not repeat early.
    return prompts[(index + 7 * block + 3 * concurrency) % len(prompts)]


def seed_at(seed: int, block: int, index: int) -> int:
    """The seed of request `index`: the same in every arm."""
    return (seed * 1_000_003 + block * 10_007 + index) % (2**31)
