"""What one step does about speculation: rules (what a policy says) and the StepPlan they resolve to.

    off              1 row per sequence
    chain(k)         k+1 rows: the root and k drafts in a line
    tree(d, t, n)    n rows: the n-1 likeliest nodes of a depth-d tree with t branches per node, and the root

`nodes` counts the root, as SGLang's num_draft_tokens does. A plan is looked up between steps, never switched into.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wingbeat.errors import ConfigError

MAX_DEPTH = 16
MAX_TOPK = 16
MAX_NODES = 128


@dataclass(frozen=True, slots=True)
class Rule:
    """How to speculate, whatever the batch: draft depth, branching, and rows per sequence (root included)."""

    depth: int
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        widest = _widest(self.depth, self.topk)
        checks = [
            ("depth", self.depth, 0 <= self.depth <= MAX_DEPTH, f"an integer from 0 to {MAX_DEPTH}"),
            ("topk", self.topk, 1 <= self.topk <= MAX_TOPK, f"an integer from 1 to {MAX_TOPK}"),
            (
                "nodes",
                self.nodes,
                self.depth + 1 <= self.nodes <= min(widest, MAX_NODES),
                f"an integer from depth+1={self.depth + 1} to {min(widest, MAX_NODES)} (the root counts)",
            ),
        ]
        for name, value, ok, allowed in checks:
            if not ok:
                raise ConfigError(name, value, allowed)

    def resolve(self, num_seqs: int) -> StepPlan:
        """The plan for a batch of `num_seqs` decoding sequences."""
        return StepPlan(depth=self.depth, topk=self.topk, rows=num_seqs * self.nodes)

    def fit(self, max_nodes: int) -> Rule:
        """This rule with at most `max_nodes` rows per sequence (drafts shrink before anything else does)."""
        if self.nodes <= max_nodes:
            return self
        if max_nodes <= 1:
            return OFF
        return Rule(min(self.depth, max_nodes - 1), self.topk, max_nodes)

    def shallower(self, max_depth: int) -> Rule:
        """This rule with at most `max_depth` draft steps, and no more nodes than that many can give."""
        if self.depth <= max_depth:
            return self
        if max_depth < 1:
            return OFF
        return Rule(max_depth, self.topk, min(self.nodes, _widest(max_depth, self.topk)))

    def __str__(self) -> str:
        if self.depth == 0:
            return "off"
        if self.topk == 1:
            return f"chain({self.depth})"
        return f"tree({self.depth},{self.topk},{self.nodes})"


def _widest(depth: int, topk: int) -> int:
    """Nodes of the whole tree: topk children of the root, then topk of each of the topk that go on."""
    return 1 + topk + (depth - 1) * topk**2 if depth else 1


OFF = Rule(0, 1, 1)


def chain(depth: int) -> Rule:
    return Rule(depth, 1, depth + 1)


def tree(depth: int, topk: int, nodes: int) -> Rule:
    return Rule(depth, topk, nodes)


def parse_rule(text: str) -> Rule:
    """'off', 'chain(k)' or 'tree(depth,topk,nodes)'. Raises ConfigError on anything else."""
    compact = re.sub(r"\s+", "", text)
    if compact == "off":
        return OFF
    if found := re.fullmatch(r"chain\((\d+)\)", compact):
        return chain(_at_least_one(int(found[1])))
    if found := re.fullmatch(r"tree\((\d+),(\d+),(\d+)\)", compact):
        depth, topk, nodes = (int(number) for number in found.groups())
        return tree(_at_least_one(depth), topk, nodes)
    raise ConfigError("plan", text, "expected off, chain(k) or tree(depth,topk,nodes), e.g. chain(3)")


def _at_least_one(depth: int) -> int:
    if depth < 1:
        raise ConfigError("depth", depth, f"an integer from 1 to {MAX_DEPTH} (off is depth 0)")
    return depth


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's decision. `rows` is the total for the decoding sequences, roots included."""

    depth: int
    topk: int
    rows: int

    def nodes(self, num_seqs: int) -> int:
        """Equal share of a sequence, root included."""
        return max(1, self.rows // max(num_seqs, 1))
