"""EngineCore: the host's half of a step - prepare() decides and reserves, digest() reads and reports.

Both loops (loop.py) are made of these two and Stepper.run between them.
"""

from __future__ import annotations

from wingbeat.engine.observe import StepObserver
from wingbeat.engine.pending import Pending
from wingbeat.engine.scheduler import MustDrain, Schedule, Scheduler
from wingbeat.engine.sequence import Sequence
from wingbeat.engine.step import StepInput, Stepper, StepResult
from wingbeat.spec.block import Prefill
from wingbeat.spec.cost import CostTable
from wingbeat.spec.plan import OFF, Rule
from wingbeat.spec.policy import Decision, LoadSnapshot, Policy
from wingbeat.types import ChoiceDelta, FinishReason, TokenLogprob


class EngineCore:
    """Owns the running sequences' bookkeeping; tells its observer of every step."""

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
        self.policy = policy
        self.observer = StepObserver(costs)
        self._eos_ids = eos_ids

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
        chosen = self._choose(schedule)
        rule, caps = self._shrink(chosen, schedule)
        self._write_page_tables(schedule)
        self.observer.note(rule, len(self.scheduler.running))
        return self._pending(schedule, rule, caps, probe=self._probes(chosen, len(schedule.decode)))

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

    def _choose(self, schedule: Schedule) -> Rule:
        """The policy's rule for this step."""
        if not self.stepper.has_drafter:
            self.observer.decision = Decision(rule=OFF, reason="no drafter is loaded")
            return OFF
        if not schedule.decode:
            return OFF
        load = LoadSnapshot(
            num_running=len(self.scheduler.running),
            num_decode=len(schedule.decode),
            prefill_rows=sum(chunk.num_rows for chunk in schedule.chunks),
            total_context=sum(s.context_len for s in schedule.decode),
        )
        self.observer.decision = self.policy.choose(load, self.observer.stats, self.observer.costs)
        return self.observer.decision.rule

    def _shrink(self, rule: Rule, schedule: Schedule) -> tuple[Rule, list[int]]:
        """The rule that can run, and the deepest draft of each decoding sequence.

        Drafts get what others leave: scratch rows beside prefill, depth that some request can use, free pages.
        """
        left = self.stepper.max_rows - sum(chunk.num_rows for chunk in schedule.chunks)
        rule = rule.fit(left // max(len(schedule.decode), 1))
        wanted = [self._depth_cap(sequence, rule.depth) for sequence in schedule.decode]
        granted = self.scheduler.grant(schedule.decode, max(wanted, default=0))
        return rule.shallower(granted), [min(cap, granted) for cap in wanted]

    def _probes(self, rule: Rule, num_decode: int) -> bool:
        """Whether the drafter guesses along in a step that auto decided to run without drafts."""
        return rule == OFF and num_decode > 0 and self.policy.spec == "auto" and self.observer.probe_is_due(num_decode)

    @staticmethod
    def _depth_cap(sequence: Sequence, depth: int) -> int:
        """Deepest draft of this sequence, at most `depth`: what its request allows and what it can still use."""
        cap = sequence.request.params.max_draft_depth
        room = sequence.max_len - len(sequence.tokens) - sequence.num_unread - 1  # no row beyond max_len
        return max(min(depth, room, depth if cap is None else cap), 0)

    def _pending(self, schedule: Schedule, rule: Rule, caps: list[int], *, probe: bool) -> Pending:
        prefills = [Prefill(c.sequence.lane, c.start, c.num_rows, c.samples) for c in schedule.chunks]
        chunks = [(c.sequence, p) for c, p in zip(schedule.chunks, prefills, strict=True)]
        everyone = [*schedule.decode, *(sequence for sequence, _ in chunks)]
        constraints = {s.lane: s.matcher.bitmasks for s in everyone if s.matcher is not None}
        logprobs = {s.lane: s.request.params.logprobs for s in everyone if s.request.params.logprobs is not None}
        bounds = [min(cap, rule.depth) + 1 for cap in caps] + [int(p.samples) for p in prefills]
        for sequence, bound in zip(everyone, bounds, strict=True):
            sequence.note_handed_over(bound)
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
        self.observer.read(pending, result)
        deltas: list[ChoiceDelta] = []
        for i, sequence in enumerate(pending.sequences):
            sequence.note_read(pending.bounds[i])
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
        self.observer.refresh_gauges(self.scheduler)
        return deltas

    def _advance(self, sequence: Sequence, i: int, pending: Pending, result: StepResult) -> ChoiceDelta | None:
        tokens = result.tokens[i]
        if result.failed[i]:
            return self.finish(sequence, "error", error="the target's logits were not finite (NaN or Inf)")
        if i >= len(pending.decode):
            self.observer.metrics.prompt_tokens += pending.chunks[i - len(pending.decode)][1].num_rows
        if not tokens:
            return None
        update = sequence.detokenizer.append(tokens)
        kept = tokens[: update.num_tokens_kept] if update.stop is not None else tokens
        sequence.tokens.extend(kept)
        sequence.num_target_forwards += 1
        if result.num_drafts[i]:
            for counts in (sequence, self.observer.metrics):
                counts.count_drafts(result.draft_depth[i], result.num_drafts[i], len(kept) - 1)
        if sequence.matcher is not None:
            sequence.matcher.advance(kept)
        self.observer.metrics.generation_tokens += len(kept)
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

    def _end(
        self, sequence: Sequence, kept: list[int], stop: str | None
    ) -> tuple[FinishReason | None, str | int | None]:
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
        self.observer.metrics.finished[reason] = self.observer.metrics.finished.get(reason, 0) + 1

    def _retire(self, sequence: Sequence) -> None:
        if sequence.num_unread_steps == 0 and (sequence.lane >= 0 or sequence in self.scheduler.waiting):
            self.scheduler.settle(sequence)
            self.scheduler.remove(sequence)

    def abort(self, sequence: Sequence) -> ChoiceDelta:
        delta = self.finish(sequence, "abort")
        self._retire(sequence)
        return delta
