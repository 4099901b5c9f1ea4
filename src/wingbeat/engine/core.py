"""EngineCore: the host's half of a step - prepare() decides and reserves, digest() reads and reports.

Both loops (loop.py) are made of these two and Stepper.run between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from wingbeat.engine.metrics import Beliefs, EngineMetrics, Timeline
from wingbeat.engine.scheduler import MustDrain, Schedule, Scheduler
from wingbeat.engine.sequence import Sequence
from wingbeat.engine.step import StepInput, Stepper, StepResult
from wingbeat.spec.block import Prefill
from wingbeat.spec.cost import CostTable
from wingbeat.spec.plan import OFF, Rule
from wingbeat.spec.policy import Decision, LoadSnapshot, Policy
from wingbeat.spec.stats import AcceptStats, Observation
from wingbeat.types import ChoiceDelta, FinishReason, TokenLogprob

PROBE_SHARE = 0.005
"""Most of the time that probes may take while off."""


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


class EngineCore:
    """Owns the running sequences' bookkeeping; the only writer of metrics, acceptance and cost observations."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        stepper: Stepper,
        policy: Policy,
        costs: CostTable | None,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.scheduler, self.stepper = scheduler, stepper
        self.policy, self.costs = policy, costs
        self.stats = AcceptStats()
        self.metrics = EngineMetrics(pages_total=scheduler.prefix.pages.num_pages)
        self.timeline = Timeline()
        self._eos_ids = eos_ids
        self._decision = Decision(rule=OFF, reason="nothing has run yet")
        self._rule = OFF
        self._started = self._last_read = perf_counter()
        self._off_seconds_since_probe = 0.0
        self._busy = False

    # -- prepare -------------------------------------------------------------------------------------------------

    def prepare(self, *, unread: bool) -> Pending | None:
        """The next step, with pages reserved and lanes opened; None when nothing can run.

        Raises MustDrain when steps must be read first.
        """
        if unread and any(s.matcher is not None for s in self.scheduler.running):
            raise MustDrain  # a grammar's masks need the tokens of the step before
        schedule = self.scheduler.schedule(unread=unread)
        for sequence in schedule.admitted:
            self._open_lane(sequence)
        if not schedule.decode and not schedule.chunks:
            return None
        rule, probe = self._choose(schedule)
        rule = self._fit_rows(rule, schedule)
        granted = self.scheduler.grant(schedule.decode, rule.depth)
        self._write_page_tables(schedule)
        caps = [self._depth_cap(sequence, granted) for sequence in schedule.decode]
        if not any(caps):
            rule = OFF
        return self._pending(schedule, rule, caps, probe)

    def _open_lane(self, sequence: Sequence) -> None:
        lanes, request = self.stepper.lanes, sequence.request
        lanes.open(
            sequence.lane,
            tokens=sequence.tokens,
            prompt_len=sequence.prompt_len,
            max_len=sequence.max_len,
            params=request.params,
            seed=sequence.seed,
            choice_index=sequence.choice_index,
            eos_ids=self._eos_ids,
        )
        if sequence.context_len and self.stepper.listener is not None:
            last_page = sequence.pages[len(sequence.page_keys) - 1]
            lanes.resume_at(sequence.lane, sequence.context_len, self.stepper.listener.page_features[last_page])
        elif sequence.context_len:
            lanes.resume_at(sequence.lane, sequence.context_len, lanes.feature[sequence.lane])

    def _write_page_tables(self, schedule: Schedule) -> None:
        for sequence in [*schedule.decode, *schedule.admitted]:
            first = sequence.num_table_pages
            if first < len(sequence.pages):
                self.stepper.lanes.set_pages(sequence.lane, first, sequence.pages[first:])
                sequence.num_table_pages = len(sequence.pages)

    def _choose(self, schedule: Schedule) -> tuple[Rule, bool]:
        """The policy's rule for this step, and whether to probe while off."""
        load = LoadSnapshot(
            num_running=len(self.scheduler.running),
            num_decode=len(schedule.decode),
            num_waiting=len(self.scheduler.waiting),
            prefill_rows=sum(chunk.num_rows for chunk in schedule.chunks),
            total_context=sum(s.context_len for s in schedule.decode),
        )
        self._rule = OFF
        if not self.stepper.has_drafter:
            self._decision = Decision(rule=OFF, reason="no drafter is loaded")
            return OFF, False
        if load.num_decode:
            self._decision = self.policy.choose(load, self.stats, self.costs)
        rule = self._rule = self._decision.rule if load.num_decode else OFF
        self.timeline.note(perf_counter() - self._started, rule, load.num_running, self._decision)
        return rule, rule == OFF and load.num_decode > 0 and self._probe_is_due(load)

    def _fit_rows(self, rule: Rule, schedule: Schedule) -> Rule:
        """Prefill rows count: drafts get only the scratch rows they leave."""
        left = self.stepper.max_rows - sum(chunk.num_rows for chunk in schedule.chunks)
        return rule.fit(left // max(len(schedule.decode), 1))

    def _probe_is_due(self, load: LoadSnapshot) -> bool:
        if self.costs is None or self.policy.spec != "auto":
            return False
        price = self.costs.costs.draft_level(load.num_decode)
        if self._off_seconds_since_probe * PROBE_SHARE < price:
            return False
        self._off_seconds_since_probe = 0.0
        return True

    @staticmethod
    def _depth_cap(sequence: Sequence, granted: int) -> int:
        """Deepest draft of this sequence: what pages allow, what its request allows, what it can still use."""
        cap = sequence.request.params.max_draft_depth
        room = sequence.max_len - len(sequence.tokens) - sequence.num_unread - 1  # no row beyond max_len
        return max(min(granted, room, granted if cap is None else cap), 0)

    def _pending(self, schedule: Schedule, rule: Rule, caps: list[int], probe: bool) -> Pending:
        prefills = [Prefill(c.sequence.lane, c.start, c.num_rows, c.samples) for c in schedule.chunks]
        chunks = [(c.sequence, p) for c, p in zip(schedule.chunks, prefills, strict=True)]
        everyone = [*schedule.decode, *(sequence for sequence, _ in chunks)]
        constraints = {s.lane: s.matcher.bitmasks for s in everyone if s.matcher is not None}
        logprobs = {s.lane: s.request.params.logprobs for s in everyone if s.request.params.logprobs is not None}
        bounds = [min(cap, rule.depth) + 1 for cap in caps] + [int(p.samples) for p in prefills]
        for sequence, bound in zip(everyone, bounds, strict=True):
            sequence.num_unread += bound
            sequence.num_unread_steps += bound > 0
        step = StepInput(
            decode=[s.lane for s in schedule.decode],
            prefills=prefills,
            rule=rule,
            depth_caps=caps,
            probe=probe,
            constraints=constraints or None,
            logprobs=logprobs or None,
        )
        return Pending(
            step=step,
            decode=schedule.decode,
            chunks=chunks,
            rule=rule,
            bounds=bounds,
            total_context=sum(s.context_len for s in schedule.decode),
        )

    # -- digest --------------------------------------------------------------------------------------------------

    def digest(self, pending: Pending, result: StepResult) -> list[ChoiceDelta]:
        """Books one step's results and says what each choice got."""
        self._observe(pending, result)
        deltas: list[ChoiceDelta] = []
        for i, sequence in enumerate(pending.sequences):
            sequence.num_unread -= pending.bounds[i]
            sequence.num_unread_steps -= pending.bounds[i] > 0
            if sequence.finished:  # ended before this step was read: its surplus is dropped
                self._retire(sequence)
                continue
            sequence.context_len += result.num_committed[i]
            delta = self._advance(sequence, i, pending, result)
            if delta is not None:
                deltas.append(delta)
            if sequence.finished:
                self._retire(sequence)
            else:
                self.scheduler.settle(sequence)
        self.refresh_gauges()
        return deltas

    def _advance(self, sequence: Sequence, i: int, pending: Pending, result: StepResult) -> ChoiceDelta | None:
        tokens = result.tokens[i]
        if result.failed[i]:
            return self.finish(sequence, "error", error="the target's logits were not finite (NaN or Inf)")
        if i >= len(pending.decode):
            self.metrics.prompt_tokens += pending.chunks[i - len(pending.decode)][1].num_rows
        if not tokens:
            return None
        update = sequence.detokenizer.append(tokens)
        kept = tokens[: update.num_tokens_kept] if update.stop is not None else tokens
        sequence.tokens.extend(kept)
        sequence.num_target_forwards += 1
        if result.num_drafts[i]:
            sequence.count_drafts(result.draft_depth[i], result.num_drafts[i], len(kept) - 1)
        if sequence.matcher is not None:
            sequence.matcher.advance(kept)
        self.metrics.generation_tokens += len(kept)
        return self._delta(sequence, kept, update.text, update.stop, result.logprobs[i])

    def _delta(
        self, sequence: Sequence, kept: list[int], text: str, stop: str | None, logprobs: list[TokenLogprob]
    ) -> ChoiceDelta:
        reason, stop_reason = self._end(sequence, kept, stop)
        if reason is not None:
            self._finish_counters(sequence, reason)
            if stop is None:
                text += sequence.detokenizer.finish()
        return ChoiceDelta(
            request_id=sequence.request.request_id,
            choice_index=sequence.choice_index,
            token_ids=tuple(kept),
            text=text,
            logprobs=tuple(logprobs[: len(kept)]) if logprobs else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            stats=sequence.stats() if reason is not None else None,
        )

    def _end(self, sequence: Sequence, kept: list[int], stop: str | None) -> tuple[FinishReason | None, str | int | None]:
        params = sequence.request.params
        if stop is not None:
            return "stop", stop
        if kept[-1] in params.stop_token_ids:
            return "stop", kept[-1]
        if kept[-1] in self._eos_ids and not params.ignore_eos:
            return "stop", None
        if len(sequence.tokens) >= sequence.max_len:
            return "length", None
        return None, None

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> ChoiceDelta:
        """Ends a choice from outside (abort, failure). Its pages go back once no unread step uses them."""
        self._finish_counters(sequence, reason)
        return ChoiceDelta(
            request_id=sequence.request.request_id,
            choice_index=sequence.choice_index,
            token_ids=(),
            text=sequence.detokenizer.finish(),
            finish_reason=reason,
            error=error,
            stats=sequence.stats(),
        )

    def _finish_counters(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finished = True
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1

    def _retire(self, sequence: Sequence) -> None:
        if sequence.num_unread_steps == 0 and (sequence.lane >= 0 or sequence in self.scheduler.waiting):
            self.scheduler.settle(sequence)
            self.scheduler.remove(sequence)

    def abort(self, sequence: Sequence) -> ChoiceDelta:
        delta = self.finish(sequence, "abort")
        self._retire(sequence)
        return delta

    # -- observe -------------------------------------------------------------------------------------------------

    def _observe(self, pending: Pending, result: StepResult) -> None:
        m, times, now = self.metrics, result.times, perf_counter()
        interval = now - self._last_read
        self._last_read = now
        m.steps += 1
        m.target_forwards += bool(pending.decode or any(p.samples for _, p in pending.chunks))
        m.draft_seconds += times.draft
        m.verify_seconds += times.verify
        m.accept_seconds += times.accept
        m.listen_seconds += times.listen
        if self._busy:
            m.host_seconds += max(interval - times.total, 0.0)
            self._observe_interval(pending, result, interval)
        self._busy = True
        if result.probe_hits is not None:
            m.probes += 1
            self.stats.observe_probes(result.probe_hits)
        self.stats.observe(self._observations(pending, result))

    def _observe_interval(self, pending: Pending, result: StepResult, interval: float) -> None:
        if pending.rule == OFF and pending.decode:
            self._off_seconds_since_probe += interval
        if pending.chunks or not pending.decode or result.probe_hits is not None:
            return
        tokens = sum(len(t) for t in result.tokens)
        rate, old = tokens / interval, self.metrics.achieved_tokens_per_s
        self.metrics.achieved_tokens_per_s = rate if old == 0 else old + 0.05 * (rate - old)
        if self.costs is not None:
            self.costs.observe(len(pending.decode), pending.rule, interval, total_context=pending.total_context)

    def _observations(self, pending: Pending, result: StepResult) -> list[Observation]:
        """Acceptance evidence carries the rule it was made under; sequences that had already ended give none."""
        seen: list[Observation] = []
        for i in range(len(pending.decode)):
            if result.num_drafts[i] and result.tokens[i]:
                depth, matched = result.draft_depth[i], result.matched[i]
                seen.append(Observation(pending.rule, depth, matched))
                self.metrics.num_drafts += 1
                self.metrics.num_draft_tokens += result.num_drafts[i]
                self.metrics.num_accepted_tokens += matched
                self.metrics.count_position(depth, matched)
        return seen

    def idle(self) -> None:
        """Nothing to run: the time until the next step is nobody's."""
        self._busy = False
        self._last_read = perf_counter()

    def refresh_gauges(self) -> None:
        m, pages = self.metrics, self.scheduler.prefix.pages
        m.num_running, m.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        m.preemptions, m.pages_held = self.scheduler.num_preemptions, pages.num_held
        m.prefix_queried_tokens = self.scheduler.prefix.num_queried_tokens
        m.prefix_hit_tokens = self.scheduler.prefix.num_hit_tokens
        rule = self.plan
        m.plan_depth, m.plan_topk, m.plan_rows = rule.depth, rule.topk, rule.nodes * m.num_running
        m.predicted_tokens_per_s = self._decision.predicted_tokens_per_s or 0.0

    @property
    def plan(self) -> Rule:
        """The rule of the newest step."""
        return self._rule

    def beliefs(self) -> Beliefs:
        return Beliefs(
            acceptance=tuple(round(alpha, 4) for alpha in self.stats.conditional(8)),
            predicted_tokens_per_s=self._decision.predicted_tokens_per_s,
            predicted_off_tokens_per_s=self._decision.predicted_off_tokens_per_s,
            achieved_tokens_per_s=self.metrics.achieved_tokens_per_s,
            reason=self._decision.reason,
        )
