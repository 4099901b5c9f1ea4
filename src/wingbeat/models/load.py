"""Loading: a name or a directory in, a ready model out. Everything wrong with it is a CheckpointError first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from wingbeat.kernels.interface import KernelFactory
from wingbeat.models.checkpoint import Checkpoint
from wingbeat.models.config import ModelConfig, generation_eos
from wingbeat.models.decoder import DecoderModel, assemble_weights, tensor_shapes
from wingbeat.models.eagle3 import Eagle3Drafter
from wingbeat.models.eagle3_config import fit_to_target, read_draft_config
from wingbeat.models.eagle3_weights import read_draft_weights
from wingbeat.models.fields import read_json
from wingbeat.models.registry import find_architecture, read_model_config
from wingbeat.models.resolve import resolve_drafter, resolve_model

CPU = torch.device("cpu")


def read_config(model: str | Path) -> ModelConfig:
    """The checked config of a target, without loading it (its saved dtype and context length, for instance)."""
    directory = resolve_model(model)
    config = read_model_config(read_json(directory / "config.json"))
    return replace(config, eos_token_ids=merge_ids(config.eos_token_ids, generation_eos(directory)))


def load_target(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    kernels: KernelFactory | None = None,
) -> DecoderModel:
    """A target from a directory, a .gguf file or a known name such as "smollm2"; dtype None keeps the saved one."""
    directory = resolve_model(model, dtype)
    config = read_config(directory)
    dtype = dtype or config.dtype
    architecture = find_architecture(config.architecture, str(directory))
    checkpoint = Checkpoint.open(directory)
    # A tied checkpoint may repeat the embedding as lm_head.weight; it is the same tensor by definition.
    ignorable = ("lm_head.weight",) if config.tied else ()
    checkpoint.check(tensor_shapes(config, architecture), ignorable)
    weights = assemble_weights(config, architecture, lambda name: checkpoint.read(name, dtype, device))
    digest = checkpoint.digest(read_json(directory / "config.json"))
    return DecoderModel(
        config.info(dtype=dtype, digest=digest), config, weights, kernels or default_kernels(dtype, device)
    )


def load_drafter(drafter: str | Path, target: DecoderModel, *, kernels: KernelFactory | None = None) -> Eagle3Drafter:
    """An EAGLE-3 drafter for `target`, in its dtype and on its device; "default" is the one shipped for it."""
    directory = resolve_drafter(drafter)
    fields = read_json(directory / "config.json")
    config = read_draft_config(fields)
    aux_layer_ids = fit_to_target(config, target.info)
    checkpoint = Checkpoint.open(directory)
    weights = read_draft_weights(checkpoint, config, target, num_aux=len(aux_layer_ids))
    return Eagle3Drafter(
        config.layer.info(dtype=target.info.dtype, digest=checkpoint.digest(fields)),
        config,
        weights,
        kernels or default_kernels(target.info.dtype, target.embedding.device),
        aux_layer_ids=aux_layer_ids,
        num_positions=target.info.max_position_embeddings,
    )


def default_kernels(dtype: torch.dtype, device: torch.device) -> KernelFactory:
    """The backend dispatch picks for this dtype and device."""
    from wingbeat.kernels.dispatch import kernel_factory

    return kernel_factory(device, dtype, torch.get_num_threads())


def merge_ids(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """All ids in order of first appearance."""
    return tuple(dict.fromkeys(token_id for group in groups for token_id in group))
