"""What an engine is built from, sized by its config: checks before weights are read, pages, scratch, costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from wingbeat.cache.pool import KVPool
from wingbeat.engine.calibrate import calibrate, warm_up
from wingbeat.engine.config import EngineConfig
from wingbeat.engine.step import Stepper
from wingbeat.errors import CheckpointError, ConfigError
from wingbeat.kernels.sampling import sampler_for
from wingbeat.models.eagle3_config import fit_to_target, read_draft_config
from wingbeat.models.fields import read_json
from wingbeat.models.interface import Drafter, ModelInfo, TargetModel
from wingbeat.models.load import read_config
from wingbeat.models.resolve import resolve_drafter
from wingbeat.runtime.lanes import Lanes
from wingbeat.spec.cost import CostTable
from wingbeat.spec.listen import Listener
from wingbeat.spec.plan import MAX_DEPTH, MAX_TOPK
from wingbeat.spec.policy import Policy
from wingbeat.spec.propose import Speaker

Tell = Callable[[str], None]
"""Hears what a start is doing, stage by stage."""
DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
DEFAULT_MAX_LEN = 8192
CPU_POOL_CAP = 2 * 2**30
ROWS_PER_LANE = 17
"""Scratch rows per lane: trees of 16 and a spare; wider trees shrink at the fullest batches."""

SPARE_SLOTS = 16
"""Slots per lane for drafts whose fate is open: two steps of chain(8) when one of them is unread. Deeper ones need free
pages."""


def tell_nobody(stage: str) -> None:
    """A Tell for scripts and tests."""


def check_models(config: EngineConfig, directory: Path, dtype: torch.dtype) -> None:
    """Refuses what can be refused from the configs of the target (in `directory`) and of the drafter alone."""
    info = read_config(directory).info(dtype=dtype, digest="")
    count_pages(config, info, context_limit(config, info))
    if config.drafter_name is not None:
        fit_to_target(read_draft_config(read_json(find_drafter(config.drafter_name) / "config.json")), info)
    first_policy(config, has_drafter=config.drafter_name is not None)


def find_drafter(name: str) -> Path:
    """The drafter's directory. Raises ConfigError under the name of the setting that named it."""
    try:
        return resolve_drafter(name)
    except CheckpointError:
        allowed = "a directory with an EAGLE-3 drafter, 'default' (the one shipped, for smollm2), 'none' or 'auto'"
        raise ConfigError("speculative_model", name, allowed) from None


def first_policy(config: EngineConfig, *, has_drafter: bool) -> Policy:
    """The policy to begin with. Raises ConfigError for one that needs an absent drafter."""
    policy = config.first_policy()
    if has_drafter or policy.spec in ("off", "auto"):
        return policy
    needs = "it needs a drafter: set speculative_model"
    if config.speculative_disable_batch_threshold is not None:
        raise ConfigError("speculative_disable_batch_threshold", config.speculative_disable_batch_threshold, needs)
    raise ConfigError("policy", config.policy, needs)


def context_limit(config: EngineConfig, info: ModelInfo) -> int:
    """Most tokens of prompt and answer. Raises ConfigError for more than the model has positions."""
    if config.max_model_len is None:
        return min(info.max_position_embeddings, DEFAULT_MAX_LEN)
    if config.max_model_len > info.max_position_embeddings:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"at most the model's {info.max_position_embeddings} positions"
        )
    return config.max_model_len


def count_pages(config: EngineConfig, info: ModelInfo, max_len: int) -> int:
    """Pages of the pool. The target alone decides, so a boot with a drafter admits exactly what one without does.

    Raises ConfigError when one sequence of `max_len` tokens would not fit.
    """
    page_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim * info.dtype.itemsize * config.block_size
    needed = -(-max_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        pages, field = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        pages, field = config.kv_cache_memory_bytes // page_bytes, "kv_cache_memory_bytes"
    else:
        share = int(psutil.virtual_memory().available * config.gpu_memory_utilization)
        pages = min(min(share, CPU_POOL_CAP) // page_bytes, config.max_num_seqs * needed)
        field = "gpu_memory_utilization"
    if pages < needed:
        raise ConfigError(
            field,
            getattr(config, field),
            f"it gives {pages} pages of {page_bytes} bytes, and one sequence of max_model_len={max_len} tokens needs "
            f"{needed}",
        )
    return pages


def count_spare_pages(config: EngineConfig) -> int:
    """Pages beyond those that requests are admitted into, for slots of drafts: so that a pool full of reusable prefixes
    leaves drafts their place, and drafts leave the others theirs."""
    return -(-SPARE_SLOTS // config.block_size) * config.max_num_seqs


def build_stepper(
    config: EngineConfig, target: TargetModel, drafter: Drafter | None, num_pages: int, max_len: int
) -> Stepper:
    """The device's side: pools of pages and scratch rows, lanes, and what speaks and listens."""
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
        listener=Listener(drafter, draft_pool, lanes, num_pages, config.block_size),
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


def measure_costs(config: EngineConfig, stepper: Stepper, num_pages: int, tell: Tell) -> CostTable | None:
    """Runs every path once, and times them where there is something to decide (None without a drafter).

    Whatever the first policy is: set_policy("auto") may come while sequences run, and timing then would overwrite their
    lanes and pages, and the prefixes kept for reuse.
    """
    tell("compiling kernels (half a minute the first time on this machine)")
    warm_up(stepper, num_pages=num_pages, page_size=config.block_size)
    if not stepper.has_drafter:
        return None
    tell("timing the steps of every batch size")
    return CostTable(
        calibrate(stepper, max_num_seqs=config.max_num_seqs, num_pages=num_pages, page_size=config.block_size)
    )
