"""Engine: built from a config, fed with requests, stepped by whoever owns its thread."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

import numpy as np
import psutil
import torch

from wingbeat import __version__
from wingbeat.cache.prefix import PrefixCache
from wingbeat.engine.build import (
    DTYPES,
    Tell,
    build_stepper,
    check_models,
    context_limit,
    count_pages,
    count_spare_pages,
    first_policy,
    measure_costs,
    tell_nobody,
)
from wingbeat.engine.config import EngineConfig
from wingbeat.engine.core import EngineCore
from wingbeat.engine.loop import Loop, OverlappedLoop, PlainLoop
from wingbeat.engine.metrics import EngineInfo, EngineMetrics, SpeculationState
from wingbeat.engine.scheduler import Scheduler
from wingbeat.engine.sequence import Sequence
from wingbeat.errors import CapacityError, ConfigError, RequestError
from wingbeat.kernels.dispatch import kernel_factory
from wingbeat.kernels.interface import KernelFactory
from wingbeat.models.interface import Drafter, ModelInfo, TargetModel
from wingbeat.models.load import load_drafter, load_target
from wingbeat.models.random import dummy_target
from wingbeat.models.resolve import resolve_model
from wingbeat.runtime.lanes import MAX_BIAS_IDS
from wingbeat.text.detokenize import Detokenizer
from wingbeat.text.grammar import GrammarCompiler
from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import ChoiceDelta, Request


class Engine:
    """One target, maybe one drafter, one page pool. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        target: TargetModel,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        tell: Tell = tell_nobody,
    ) -> None:
        """Raises ConfigError where the config does not fit the models."""
        self.config, self.tokenizer, self.model_name = config, tokenizer, config.model
        self.max_model_len = context_limit(config, target.info)
        self._target, self._drafter = target, drafter
        policy = first_policy(config, has_drafter=drafter is not None)
        self._num_pages = count_pages(config, target.info, self.max_model_len)
        spare = 0 if drafter is None else count_spare_pages(config)
        num_pages = self._num_pages + spare
        self._prefix = PrefixCache(num_pages, config.block_size, enabled=config.enable_prefix_caching)
        stepper = build_stepper(config, target, drafter, num_pages, self.max_model_len)
        self._core = EngineCore(
            scheduler=Scheduler(
                self._prefix, num_lanes=config.max_num_seqs, max_rows=config.max_num_batched_tokens, spare=spare
            ),
            stepper=stepper,
            policy=policy,
            costs=measure_costs(config, stepper, num_pages, tell),
            eos_ids=tuple(tokenizer.eos_token_ids),
        )
        self._loop: Loop = PlainLoop(self._core) if config.loop == "plain" else OverlappedLoop(self._core)
        self._seeds = np.random.default_rng(config.seed)
        self.grammars = GrammarCompiler(tokenizer)
        """Compile a request's schema here, on another thread, before it is added: add() then finds it compiled."""
        self._sequences: dict[str, list[Sequence]] = {}
        self._arrivals = 0

    @classmethod
    def from_config(cls, config: EngineConfig, tell: Tell = tell_nobody) -> Engine:
        """Loads what the config names. Raises ConfigError or CheckpointError, before any weight is read if it can."""
        dtype, device = DTYPES[config.dtype], torch.device("cpu")
        num_threads = config.num_threads or psutil.cpu_count(logical=False) or 1
        torch.set_num_threads(num_threads)
        kernels = kernel_factory(device, dtype, num_threads, backend=config.kernels)
        tell(f"reading {config.model}")
        directory = resolve_model(config.model, dtype)  # once: a GGUF file is told by its digest
        check_models(config, directory, dtype)
        tell("loading weights")
        load = dummy_target if config.load_format == "dummy" else load_target
        target = load(directory, dtype=dtype, device=device, kernels=kernels)
        name = config.drafter_name
        drafter = None if name is None else load_drafter(name, target, kernels=kernels)
        return cls(config, target, drafter, Tokenizer.for_model(directory), tell)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues all choices of a request. Raises RequestError or CapacityError and then changes nothing."""
        self._check(request)
        params = request.params
        grammar = self.grammars.compile(request.json_schema) if request.json_schema is not None else None
        room = self.max_model_len - len(request.prompt_token_ids)
        max_len = len(request.prompt_token_ids) + min(room, params.max_tokens or room)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**62))
        sequences = [
            Sequence(
                request=request,
                choice_index=choice,
                seed=seed,
                arrival=self._arrivals + choice,
                max_len=max_len,
                detokenizer=Detokenizer(self.tokenizer, params),
                tokens=list(request.prompt_token_ids),
                matcher=grammar.matcher() if grammar is not None else None,
            )
            for choice in range(params.n)
        ]
        self._arrivals += params.n
        self._sequences[request.request_id] = sequences
        for sequence in sequences:
            self._core.scheduler.add(sequence)

    def encode_chat(self, messages: Seq[Mapping[str, object]], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template (options: see ChatTemplate.render).

        Raises RequestError naming the message that is wrong.
        """
        if self.tokenizer.template is None:
            raise RequestError("messages", f"{len(messages)} messages", "this model has no chat template: use a prompt")
        text = self.tokenizer.template.render(messages, **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _check(self, request: Request) -> None:
        params, vocab = request.params, self._target.info.vocab_size
        num_prompt = len(request.prompt_token_ids)
        if request.request_id in self._sequences:
            raise RequestError("request_id", request.request_id, "an id that is not running")
        if num_prompt == 0:
            raise RequestError("prompt", "", "at least one token")
        if num_prompt >= self.max_model_len:
            raise CapacityError(
                "prompt",
                f"{num_prompt} tokens",
                f"at most {self.max_model_len - 1} tokens, so that one can be generated (max_model_len "
                f"{self.max_model_len})",
            )
        if len(params.logit_bias) > MAX_BIAS_IDS:
            raise RequestError("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_BIAS_IDS} entries")
        named = {
            "prompt": request.prompt_token_ids,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
        }
        for name, ids in named.items():
            wrong = [token for token in ids if not 0 <= token < vocab]
            if wrong:
                raise RequestError(name, wrong[0], f"token ids from 0 to {vocab - 1}")

    def abort(self, request_id: str) -> list[ChoiceDelta]:
        """Ends every unfinished choice; unknown ids are ignored (it may have just finished)."""
        sequences = self._sequences.pop(request_id, [])
        return [self._core.abort(s) for s in sequences if not s.finished]

    def has_work(self) -> bool:
        """Something runs, waits, or was handed over and is not read yet: step() again."""
        return self._core.scheduler.has_work or self._loop.has_unread

    def step(self) -> list[ChoiceDelta]:
        """Advances everything by about one step; what became known since the last call."""
        deltas = self._loop.step()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        return deltas

    def _forget(self, request_id: str) -> None:
        sequences = self._sequences.get(request_id, [])
        if all(s.finished for s in sequences):
            self._sequences.pop(request_id, None)

    # -- control and facts ---------------------------------------------------------------------------------------

    def set_policy(self, spec: str) -> None:
        """From the next step on. Raises ConfigError for an unknown policy or one that needs an absent drafter."""
        policy = self.config.read_policy(spec)
        if self._drafter is None and policy.spec != "off":
            raise ConfigError("policy", spec, "only off: no drafter is loaded")
        self._core.policy = policy

    def reset_prefix_cache(self) -> None:
        """Forgets reusable pages that nobody holds."""
        self._prefix.clear()

    def speculation(self) -> SpeculationState:
        core, observer, metrics = self._core, self._core.observer, self.metrics()
        return SpeculationState(
            policy=core.policy.spec,
            plan=str(observer.plan),
            depth=metrics.plan_depth,
            topk=metrics.plan_topk,
            rows=metrics.plan_rows,
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            drafter=None if self._drafter is None else self.config.drafter_name or "given",
            beliefs=observer.beliefs(),
            timeline=observer.timeline.points(),
        )

    def metrics(self) -> EngineMetrics:
        self._core.observer.refresh_gauges(self._core.scheduler)
        return self._core.observer.metrics

    def info(self) -> EngineInfo:
        info, drafter = self._target.info, self._drafter
        return EngineInfo(
            version=__version__,
            model=self.model_name,
            architecture=info.architecture,
            target_digest=info.digest,
            drafter=None if drafter is None else self.config.drafter_name or "given",
            drafter_digest=None if drafter is None else drafter.info.digest,
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(self._target.embedding.device),
            kernels=_kernels(self.config, info).name,
            num_threads=torch.get_num_threads(),
            max_model_len=self.max_model_len,
            num_pages=self._num_pages,
            page_size=self.config.block_size,
            config={f.name: str(getattr(self.config, f.name)) for f in fields(self.config)},
        )

    def close(self) -> None:
        self._loop.close()


def _kernels(config: EngineConfig, info: ModelInfo) -> KernelFactory:
    return kernel_factory(torch.device("cpu"), info.dtype, torch.get_num_threads(), backend=config.kernels)
