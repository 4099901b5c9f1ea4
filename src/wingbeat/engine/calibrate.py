"""Start-up measurement: times the engine's own step on idle lanes and turns it into StepCosts.

It goes through the real path (propose, target, accept, commit, listen), so what is priced is what is served.
"""

from __future__ import annotations

import torch

from wingbeat.engine.step import StepInput, Stepper, StepTimes
from wingbeat.spec.cost import Curve, StepCosts
from wingbeat.spec.plan import OFF, Rule, chain

REPEATS = 4
SHORT_CONTEXT, LONG_CONTEXT = 64, 1024
MEASURED = chain(3)


def calibrate(stepper: Stepper, *, max_num_seqs: int, num_pages: int, page_size: int) -> StepCosts:
    """Measured costs over batch sizes 1, 2, 4, ... up to what lanes and scratch allow. Leaves no trace in pages."""
    rig = _Rig(stepper, num_pages, page_size)
    sizes = [n for n in _doubling(max_num_seqs) if n * MEASURED.nodes <= stepper.max_rows]
    spoken = {n: rig.best(n, MEASURED, SHORT_CONTEXT) for n in sizes}
    plain = {n: rig.best(n, OFF, SHORT_CONTEXT) for n in sizes}
    verify = {n: times.verify for n, times in plain.items()}
    rest = {n: times.accept + times.listen for n, times in plain.items()}
    for n, times in spoken.items():
        rows = n * MEASURED.nodes
        # Where both ways give a point, plain decoding's wins: more sequences at equal rows read more K/V.
        verify.setdefault(rows, times.verify)
        rest.setdefault(rows, times.accept + times.listen)
    long = min(LONG_CONTEXT, rig.max_context)
    busy = sizes[len(sizes) // 2]
    slope = (rig.best(busy, OFF, long).verify - plain[busy].verify) / max(busy * (long - SHORT_CONTEXT), 1)
    return StepCosts(
        verify=_curve(verify),
        draft_level=_curve({n: times.draft / MEASURED.depth for n, times in spoken.items()}),
        rest=_curve(rest),
        context_slope=max(slope, 0.0),
    )


def warm_up(stepper: Stepper, *, num_pages: int, page_size: int) -> None:
    """Runs each path once, so that the first request does not pay for compilation."""
    rig = _Rig(stepper, num_pages, page_size)
    for rule in (OFF, MEASURED, Rule(2, 2, 5)) if stepper.has_drafter else (OFF,):
        rig.run(1, rule, SHORT_CONTEXT)


def _doubling(limit: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 <= limit:
        sizes.append(sizes[-1] * 2)
    return sizes


def _curve(points: dict[int, float]) -> Curve:
    """Through the points, never falling: a faster larger forward is noise."""
    sizes = sorted(points)
    seconds = torch.tensor([points[n] for n in sizes], dtype=torch.float64).cummax(0).values.tolist()
    return Curve(tuple(sizes), tuple(seconds))


class _Rig:
    """Idle lanes dressed up as sequences in the middle of decoding."""

    def __init__(self, stepper: Stepper, num_pages: int, page_size: int) -> None:
        self._stepper, self._num_pages = stepper, num_pages
        capacity = stepper.lanes.sampling.history.shape[1]
        self.max_context = min(capacity, num_pages * page_size) - 32

    def run(self, num_seqs: int, rule: Rule, context: int) -> StepTimes:
        lanes = self._stepper.lanes
        context = max(min(context, self.max_context), 1)
        which = slice(0, num_seqs)
        table = torch.arange(num_seqs * lanes.page_table.shape[1]).view(num_seqs, -1) % self._num_pages
        lanes.page_table[which] = table.int()
        lanes.context_lens[which], lanes.sampling.history_lens[which] = context, context + 1
        lanes.sampling.prompt_lens[which], lanes.max_lens[which] = context, context + 30
        lanes.sampling.temperature[which] = 0.0
        lanes.finished[which] = False
        lanes.end_ids[which] = -1
        step = StepInput(decode=list(range(num_seqs)), prefills=[], rule=rule, depth_caps=[rule.depth] * num_seqs)
        return self._stepper.run(step).times

    def best(self, num_seqs: int, rule: Rule, context: int) -> StepTimes:
        """Fastest part by part of REPEATS runs, after one to warm up."""
        self.run(num_seqs, rule, context)
        times = [self.run(num_seqs, rule, context) for _ in range(REPEATS)]
        return StepTimes(
            draft=min(t.draft for t in times),
            verify=min(t.verify for t in times),
            accept=min(t.accept for t in times),
            listen=min(t.listen for t in times),
        )
