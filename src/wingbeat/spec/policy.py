"""Policies: pure functions from (load, acceptance, cost) to the rule of the next step.

off                       never
always[:PLAN]             PLAN whatever the load
threshold:N[:PLAN]        PLAN while at most N sequences run, else off
table:1-4=chain(3),5-=off by number of running sequences
auto                      the rule with the most expected committed tokens per second
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from wingbeat.errors import ConfigError
from wingbeat.spec.cost import CostTable
from wingbeat.spec.plan import OFF, Rule, chain, parse_rule
from wingbeat.spec.stats import AcceptStats

AUTO_RULES: tuple[Rule, ...] = (OFF, *(chain(k) for k in range(1, 9)))
"""What auto chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """Host-known facts when a step is decided."""

    num_running: int
    """Sequences that hold a lane, prefilling ones included."""
    num_decode: int
    prefill_rows: int
    total_context: int
    """Tokens in pages of the decoding sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A rule and what was believed of it; rates are None where the policy does not ask."""

    rule: Rule
    predicted_tokens_per_s: float | None = None
    predicted_off_tokens_per_s: float | None = None
    reason: str = ""


Range = tuple[int, int | None, Rule]
"""From the first number of sequences to the second (None: any more), this rule."""


class Policy(Protocol):
    @property
    def spec(self) -> str:
        """The text that parses back to this policy."""
        ...

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Always:
    rule: Rule

    @property
    def spec(self) -> str:
        return "off" if self.rule == OFF else f"always:{self.rule}"

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision:
        return Decision(rule=self.rule, reason="fixed")


@dataclass(frozen=True, slots=True)
class Threshold:
    max_running: int
    rule: Rule

    @property
    def spec(self) -> str:
        return f"threshold:{self.max_running}:{self.rule}"

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision:
        if load.num_running > self.max_running:
            return Decision(rule=OFF, reason=f"{load.num_running} sequences run, more than {self.max_running}")
        return Decision(rule=self.rule, reason=f"{load.num_running} sequences run, at most {self.max_running}")


@dataclass(frozen=True, slots=True)
class Table:
    """Inclusive ranges of running sequences, no two with a number in common; outside all of them: off."""

    ranges: tuple[Range, ...]

    @property
    def spec(self) -> str:
        return "table:" + ",".join(f"{_span(low, high)}={rule}" for low, high, rule in self.ranges)

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision:
        for low, high, rule in self.ranges:
            if low <= load.num_running and (high is None or load.num_running <= high):
                return Decision(rule=rule, reason=f"{load.num_running} sequences run, in {_span(low, high)}")
        return Decision(rule=OFF, reason=f"{load.num_running} sequences run, in no range")


@dataclass(frozen=True, slots=True)
class Auto:
    """Most expected committed tokens per second in the long run. No hysteresis: switching is free.

    The rate is that of steps that only decode. A step that also prefills takes the rule with the greatest
    tokens - rate * seconds: the prefill's time is spent under every rule and must not make drafts look cheap (in a
    step that only decodes, this is the rule with the greatest tokens / seconds).
    """

    rules: tuple[Rule, ...] = AUTO_RULES

    @property
    def spec(self) -> str:
        return "auto"

    def choose(self, load: LoadSnapshot, stats: AcceptStats, costs: CostTable | None) -> Decision:
        if costs is None or load.num_decode == 0:
            return Decision(rule=OFF, reason="nothing decodes" if costs else "no cost table (no drafter)")
        rates = {rule: self._rate(rule, load, stats, costs) for rule in self.rules}
        best = max(self.rules, key=lambda rule: rates[rule])
        if load.prefill_rows:
            rate = rates[best]
            best = max(self.rules, key=lambda rule: self._gain(rule, rate, load, stats, costs))
        return Decision(
            rule=best,
            predicted_tokens_per_s=rates[best],
            predicted_off_tokens_per_s=rates[OFF],
            reason=_explain(best, rates, load, costs, stats),
        )

    @staticmethod
    def _rate(rule: Rule, load: LoadSnapshot, stats: AcceptStats, costs: CostTable) -> float:
        """Tokens per second of a step without prefill."""
        seconds = costs.predict(load.num_decode, rule, total_context=load.total_context)
        return load.num_decode * stats.expected_tokens(rule) / seconds

    @staticmethod
    def _gain(rule: Rule, rate: float, load: LoadSnapshot, stats: AcceptStats, costs: CostTable) -> float:
        """Tokens of this step beyond those that its seconds give in the long run."""
        seconds = costs.predict(load.num_decode, rule, prefill_rows=load.prefill_rows, total_context=load.total_context)
        return load.num_decode * stats.expected_tokens(rule) - rate * seconds


def _explain(best: Rule, rates: dict[Rule, float], load: LoadSnapshot, costs: CostTable, stats: AcceptStats) -> str:
    """Why, in words, with the numbers believed."""
    other = best if best != OFF else max((rule for rule in rates if rule != OFF), key=lambda rule: rates[rule])
    off_seconds = costs.predict(load.num_decode, OFF, total_context=load.total_context)
    seconds = costs.predict(load.num_decode, other, total_context=load.total_context)
    subject = "it takes" if other == best else f"{other} would take"
    return (
        f"{best}: at {load.num_decode} sequences {subject} {seconds / off_seconds:.2f}x the step for "
        f"{stats.expected_tokens(other):.2f}x the tokens"
    )


POLICIES = "off, always[:PLAN], threshold:N[:PLAN], table:LO-HI=PLAN,..., auto"


def parse_policy(text: str, default: Rule) -> Policy:
    """A policy from its spec; `default` is the plan where the spec names none. Raises ConfigError."""
    name, _, rest = text.strip().partition(":")
    if name == "off" and not rest:
        return Always(OFF)
    if name == "auto" and not rest:
        return Auto()
    if name == "always":
        return Always(parse_rule(rest) if rest else default)
    if name == "threshold" and (found := re.fullmatch(r"(\d+)(?::(.+))?", rest)):
        return Threshold(int(found[1]), parse_rule(found[2]) if found[2] else default)
    if name == "table" and rest:
        return Table(_apart(text, [_parse_range(text, part) for part in _split_ranges(rest)]))
    raise ConfigError("policy", text, f"expected one of {POLICIES}")


def _split_ranges(text: str) -> Sequence[str]:
    """Splits at commas outside parentheses."""
    return re.split(r",(?![^(]*\))", text)


def _apart(text: str, ranges: list[Range]) -> tuple[Range, ...]:
    """The ranges as they stand. Raises ConfigError when two have a number in common: which one wins is not guessed."""
    by_start = sorted(ranges, key=lambda each: each[0])
    for (low, high, _), (next_low, next_high, _) in pairwise(by_start):
        if high is None or next_low <= high:
            both = f"{_span(low, high)} and {_span(next_low, next_high)}"
            raise ConfigError("policy", text, f"table ranges {both} overlap; each number of sequences once")
    return tuple(ranges)


def _span(low: int, high: int | None) -> str:
    return f"{low}-{'' if high is None else high}"


def _parse_range(text: str, part: str) -> Range:
    found = re.fullmatch(r"\s*(\d+)-(\d*)=(.+)", part)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise ConfigError("policy", text, f"table range {part!r}: expected LO-HI=PLAN or LO-=PLAN, e.g. 1-4=chain(3)")
    return int(found[1]), int(found[2]) if found[2] else None, parse_rule(found[3])
