"""StepObserver: what steps taught - counters, acceptance, costs - and what the policy believed.

The only writer of EngineMetrics, AcceptStats and CostTable.
"""

from __future__ import annotations

from time import perf_counter

from wingbeat.engine.metrics import Beliefs, EngineMetrics, Timeline
from wingbeat.engine.pending import Pending
from wingbeat.engine.scheduler import Scheduler
from wingbeat.engine.step import StepResult
from wingbeat.spec.cost import CostTable
from wingbeat.spec.plan import OFF, Rule
from wingbeat.spec.policy import Decision
from wingbeat.spec.stats import AcceptStats, Observation

PROBE_SHARE = 0.005
"""Most of the time that probes may take while off."""


class StepObserver:
    """Told of every step when it is decided and when it is read."""

    def __init__(self, costs: CostTable | None) -> None:
        self.costs = costs
        self.stats = AcceptStats()
        self.metrics = EngineMetrics()
        self.timeline = Timeline()
        self.decision = Decision(rule=OFF, reason="nothing has run yet")
        """The policy's newest."""
        self.plan = OFF
        """The rule of the newest step that was read: the decision's, or what was left of it."""
        self._started = self._last_read = perf_counter()
        self._off_seconds_since_probe = 0.0
        self._busy = False

    def note(self, rule: Rule, num_running: int) -> None:
        """A step with `rule` is about to run."""
        believed = self.decision.predicted_tokens_per_s if rule == self.decision.rule else None
        self.timeline.note(perf_counter() - self._started, rule, num_running, believed)

    def probe_is_due(self, num_decode: int) -> bool:
        """Whether enough time has passed while off to pay for a guess per sequence; if so it starts anew."""
        if self.costs is None or self._off_seconds_since_probe * PROBE_SHARE < self.costs.costs.draft_level(num_decode):
            return False
        self._off_seconds_since_probe = 0.0
        return True

    def idle(self) -> None:
        """Nothing to run: the time until the next step is nobody's."""
        self._busy = False
        self._last_read = perf_counter()

    def read(self, pending: Pending, result: StepResult) -> None:
        """A step's results are there."""
        m, times, now = self.metrics, result.times, perf_counter()
        interval = now - self._last_read
        self._last_read = now
        self.plan, m.plan_rows = pending.rule, result.num_rows
        m.steps += 1
        m.target_forwards += bool(pending.decode or any(p.samples for _, p in pending.chunks))
        m.draft_seconds += times.draft
        m.verify_seconds += times.verify
        m.accept_seconds += times.accept
        m.listen_seconds += times.listen
        if self._busy:
            m.host_seconds += max(interval - times.total, 0.0)
            self._read_interval(pending, result, interval)
        self._busy = True
        if result.probe_hits is not None:
            m.probes += 1
            self.stats.observe_probes(result.probe_hits)
        self.stats.observe(_observations(pending, result))

    def _read_interval(self, pending: Pending, result: StepResult, interval: float) -> None:
        if pending.rule == OFF and pending.decode:
            self._off_seconds_since_probe += interval
        if pending.chunks or not pending.decode or result.probe_hits is not None:
            return
        tokens = sum(len(t) for t in result.tokens)
        rate, old = tokens / interval, self.metrics.achieved_tokens_per_s
        self.metrics.achieved_tokens_per_s = rate if old == 0 else old + 0.05 * (rate - old)
        if self.costs is not None:
            self.costs.observe(len(pending.decode), pending.rule, interval, total_context=pending.total_context)

    def refresh_gauges(self, scheduler: Scheduler) -> None:
        m, prefix = self.metrics, scheduler.prefix
        m.num_running, m.num_waiting = len(scheduler.running), len(scheduler.waiting)
        m.preemptions = scheduler.num_preemptions
        m.pages_total, m.pages_held = prefix.pages.num_pages, prefix.pages.num_held
        m.prefix_queried_tokens, m.prefix_hit_tokens = prefix.num_queried_tokens, prefix.num_hit_tokens
        m.plan_depth, m.plan_topk = self.plan.depth, self.plan.topk
        m.predicted_tokens_per_s = self.decision.predicted_tokens_per_s or 0.0

    def beliefs(self) -> Beliefs:
        return Beliefs(
            acceptance=tuple(round(alpha, 4) for alpha in self.stats.conditional(8)),
            predicted_tokens_per_s=self.decision.predicted_tokens_per_s,
            predicted_off_tokens_per_s=self.decision.predicted_off_tokens_per_s,
            achieved_tokens_per_s=self.metrics.achieved_tokens_per_s,
            reason=self.decision.reason,
        )


def _observations(pending: Pending, result: StepResult) -> list[Observation]:
    """Acceptance evidence carries the rule it was made under; sequences that had already ended give none.

    It takes matches before the answer is cut at its end: that cut says nothing about the drafter. Counters of requests
    and engine (count_drafts) take drafts whose tokens were delivered.
    """
    return [
        Observation(pending.rule, result.draft_depth[i], result.matched[i])
        for i in range(len(pending.decode))
        if result.num_drafts[i] and result.tokens[i] and not result.failed[i]
    ]
