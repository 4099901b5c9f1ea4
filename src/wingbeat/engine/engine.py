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
from wingbeat.cache.pool import KVPool
from wingbeat.cache.prefix import PrefixCache
from wingbeat.engine.calibrate import calibrate, warm_up
from wingbeat.engine.config import EngineConfig
from wingbeat.engine.core import EngineCore
from wingbeat.engine.loop import Loop, OverlappedLoop, PlainLoop
from wingbeat.engine.metrics import EngineInfo, EngineMetrics, SpeculationState
from wingbeat.engine.scheduler import Scheduler
from wingbeat.engine.sequence import Sequence
from wingbeat.engine.step import Stepper
from wingbeat.errors import CapacityError, ConfigError, RequestError
from wingbeat.kernels.dispatch import kernel_factory
from wingbeat.kernels.interface import KernelFactory
from wingbeat.kernels.sampling import sampler_for
from wingbeat.models.interface import Drafter, ModelInfo, TargetModel
from wingbeat.models.load import load_drafter, load_target, read_config
from wingbeat.models.random import dummy_target
from wingbeat.models.resolve import resolve_model
from wingbeat.runtime.lanes import MAX_BIAS_IDS, Lanes
from wingbeat.spec.cost import CostTable
from wingbeat.spec.listen import Listener
from wingbeat.spec.plan import MAX_DEPTH, MAX_TOPK, parse_rule
from wingbeat.spec.policy import Policy, Threshold, parse_policy
from wingbeat.spec.propose import Speaker
from wingbeat.text.detokenize import Detokenizer
from wingbeat.text.grammar import GrammarCompiler
from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import ChoiceDelta, Request

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
DEFAULT_MAX_LEN = 8192
CPU_POOL_CAP = 2 * 2**30
ROWS_PER_LANE = 17
"""Scratch rows per lane: trees of 16 and a spare; wider trees shrink at the fullest batches."""


class Engine:
    """One target, maybe one drafter, one page pool. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self, config: EngineConfig, target: TargetModel, drafter: Drafter | None, tokenizer: Tokenizer
    ) -> None:
        """Raises ConfigError where the config does not fit the models."""
        self.config, self.tokenizer, self.model_name = config, tokenizer, config.model
        self.max_model_len = _max_model_len(config, target.info)
        self._target, self._drafter = target, drafter
        self._plan = parse_rule(config.speculative_plan)
        policy = self._initial_policy()
        num_pages = _num_pages(config, target.info, drafter, self.max_model_len)
        self._prefix = PrefixCache(num_pages, config.block_size, enabled=config.enable_prefix_caching)
        stepper = _build_stepper(config, target, drafter, num_pages, self.max_model_len)
        self._core = EngineCore(
            scheduler=Scheduler(
                self._prefix, num_lanes=config.max_num_seqs, max_rows=config.max_num_batched_tokens
            ),
            stepper=stepper,
            policy=policy,
            costs=_costs(config, stepper, num_pages),
            eos_ids=tuple(tokenizer.eos_token_ids),
        )
        self._loop: Loop = PlainLoop(self._core) if config.loop == "plain" else OverlappedLoop(self._core)
        self._seeds = np.random.default_rng(config.seed)
        self._grammars = GrammarCompiler(tokenizer)
        self._sequences: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._num_pages = num_pages

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Loads what the config names. Raises ConfigError or CheckpointError."""
        dtype, device = DTYPES[config.dtype], torch.device("cpu")
        num_threads = config.num_threads or psutil.cpu_count(logical=False) or 1
        torch.set_num_threads(num_threads)
        kernels = kernel_factory(device, dtype, num_threads, backend=config.kernels)
        load = dummy_target if config.load_format == "dummy" else load_target
        target = load(config.model, dtype=dtype, device=device, kernels=kernels)
        name = _drafter_name(config)
        drafter = None if name is None else load_drafter(name, target, kernels=kernels)
        return cls(config, target, drafter, Tokenizer.for_model(resolve_model(config.model, dtype)))

    def _initial_policy(self) -> Policy:
        if self._drafter is None and self.config.speculative_disable_batch_threshold is not None:
            raise ConfigError(
                "speculative_disable_batch_threshold",
                self.config.speculative_disable_batch_threshold,
                "it needs a drafter: set speculative_model",
            )
        if (limit := self.config.speculative_disable_batch_threshold) is not None:
            return Threshold(limit, self._plan)
        return parse_policy(self.config.policy, self._plan)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues all choices of a request. Raises RequestError or CapacityError and then changes nothing."""
        self._check(request)
        params = request.params
        grammar = self._grammars.compile(request.json_schema) if request.json_schema is not None else None
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
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab:
            raise RequestError("prompt", "token ids", f"ids from 0 to {vocab - 1}")
        if len(params.logit_bias) > MAX_BIAS_IDS:
            raise RequestError("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_BIAS_IDS} entries")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            wrong = [token for token in ids if not 0 <= token < vocab]
            if wrong:
                raise RequestError(name, wrong[0], f"token ids from 0 to {vocab - 1}")

    def abort(self, request_id: str) -> list[ChoiceDelta]:
        """Ends every unfinished choice; unknown ids are ignored (it may have just finished)."""
        sequences = self._sequences.pop(request_id, [])
        return [self._core.abort(s) for s in sequences if not s.finished]

    def has_work(self) -> bool:
        return self._core.scheduler.has_work

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
        policy = parse_policy(spec, self._plan)
        if self._drafter is None and policy.spec != "off":
            raise ConfigError("policy", spec, "only off: no drafter is loaded")
        self._core.policy = policy

    def reset_prefix_cache(self) -> None:
        """Forgets reusable pages that nobody holds."""
        self._prefix.clear()

    def speculation(self) -> SpeculationState:
        core = self._core
        core.refresh_gauges()
        return SpeculationState(
            policy=core.policy.spec,
            plan=str(core.plan),
            depth=core.metrics.plan_depth,
            topk=core.metrics.plan_topk,
            rows=core.metrics.plan_rows,
            num_running=core.metrics.num_running,
            num_waiting=core.metrics.num_waiting,
            drafter=None if self._drafter is None else _drafter_name(self.config) or "given",
            beliefs=core.beliefs(),
            timeline=core.timeline.points(),
        )

    def metrics(self) -> EngineMetrics:
        self._core.refresh_gauges()
        return self._core.metrics

    def info(self) -> EngineInfo:
        info, drafter = self._target.info, self._drafter
        return EngineInfo(
            version=__version__,
            model=self.model_name,
            architecture=info.architecture,
            target_digest=info.digest,
            drafter=None if drafter is None else _drafter_name(self.config) or "given",
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


def _drafter_name(config: EngineConfig) -> str | None:
    if config.speculative_model == "auto":
        return "default" if config.model == "smollm2" and config.load_format != "dummy" else None
    return None if config.speculative_model == "none" else config.speculative_model


def _kernels(config: EngineConfig, info: ModelInfo) -> KernelFactory:
    return kernel_factory(torch.device("cpu"), info.dtype, torch.get_num_threads(), backend=config.kernels)


def _max_model_len(config: EngineConfig, info: ModelInfo) -> int:
    if config.max_model_len is None:
        return min(info.max_position_embeddings, DEFAULT_MAX_LEN)
    if config.max_model_len > info.max_position_embeddings:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"at most the model's {info.max_position_embeddings} positions"
        )
    return config.max_model_len


def _num_pages(config: EngineConfig, info: ModelInfo, drafter: Drafter | None, max_len: int) -> int:
    """Pages of the pool. The target alone decides, so a boot with a drafter admits exactly what one without does."""
    page_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim * info.dtype.itemsize * config.block_size
    needed = -(-max_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        pages, field, value = config.num_gpu_blocks_override, "num_gpu_blocks_override", config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        pages, field, value = (
            config.kv_cache_memory_bytes // page_bytes,
            "kv_cache_memory_bytes",
            config.kv_cache_memory_bytes,
        )
    else:
        share = int(psutil.virtual_memory().available * config.gpu_memory_utilization)
        pages, field, value = min(share, CPU_POOL_CAP) // page_bytes, "gpu_memory_utilization", share
        pages = min(pages, config.max_num_seqs * needed)
    if pages < needed:
        raise ConfigError(
            field, value, f"room for {needed} pages of {page_bytes} bytes, one sequence of max_model_len={max_len}"
        )
    return pages


def _build_stepper(
    config: EngineConfig, target: TargetModel, drafter: Drafter | None, num_pages: int, max_len: int
) -> Stepper:
    info, device = target.info, target.embedding.device
    num_slots = num_pages * config.block_size
    pool = _pool(info, info.num_layers, num_slots, config.max_num_batched_tokens + ROWS_PER_LANE * config.max_num_seqs)
    lanes = Lanes.allocate(
        num_lanes=config.max_num_seqs,
        max_len=max_len,
        page_size=config.block_size,
        feature_size=1 if drafter is None else drafter.info.hidden_size,
        dtype=info.dtype,
        device=device,
    )
    sampler = sampler_for(device.type, info.dtype, backend=config.kernels)
    if drafter is None:
        return Stepper(target=target, pool=pool, lanes=lanes, sampler=sampler, page_size=config.block_size)
    widest = config.max_num_seqs * (1 + MAX_TOPK * (MAX_DEPTH - 1))
    draft_pool = _pool(drafter.info, 1, num_slots, widest)
    return Stepper(
        target=target,
        pool=pool,
        lanes=lanes,
        sampler=sampler,
        page_size=config.block_size,
        speaker=Speaker(drafter, draft_pool, sampler, config.block_size),
        listener=Listener(drafter, draft_pool, num_pages, config.block_size),
    )


def _pool(info: ModelInfo, num_layers: int, num_slots: int, num_scratch_rows: int) -> KVPool:
    return KVPool.allocate(
        num_layers=num_layers,
        num_slots=num_slots,
        num_scratch_rows=num_scratch_rows,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        device=torch.device("cpu"),
    )


def _costs(config: EngineConfig, stepper: Stepper, num_pages: int) -> CostTable | None:
    warm_up(stepper, num_pages=num_pages, page_size=config.block_size)
    if not stepper.has_drafter:
        return None
    return CostTable(
        calibrate(
            stepper, max_num_seqs=config.max_num_seqs, num_pages=num_pages, page_size=config.block_size
        )
    )


