"""DraftConfig: an EAGLE-3 drafter's config.json, in either layout, and whether it fits a target.

Two layouts: raw (flat; EAGLE, SpecForge, SGLang, ModelOpt) and `speculators` (the layer's config nested).
Two numberings of the aux layers: `eagle_aux_hidden_state_layer_ids` at the top counts the residual entering layer k
(ours); the same name inside `eagle_config` counts the output of layer k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.errors import CheckpointError
from wingbeat.models.config import ModelConfig, read_decoder
from wingbeat.models.fields import Fields
from wingbeat.models.interface import ModelInfo
from wingbeat.models.qwen import refuse_sliding

AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """What an EAGLE-3 checkpoint says about itself."""

    origin: str
    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    """The target's vocabulary size when the checkpoint gives none."""
    aux_layer_ids: tuple[int, ...] | None
    """Canonical numbering; None: the default of the target's depth."""
    norm_before_residual: bool
    """The residual is the normed feature (speculators)."""
    norm_before_fc: bool
    """One norm over the concatenated aux features."""
    fc_norm: bool
    """One norm per aux feature (EAGLE-3.1)."""
    norm_output: bool
    """The next level takes the normed output (EAGLE-3.1)."""


def read_draft_config(fields: Fields) -> DraftConfig:
    """The checked config of a drafter, raw or speculators layout."""
    nested = fields.section("transformer_layer_config")
    layer = _read_layer(nested or fields)
    _refuse_variants(fields)
    config = DraftConfig(
        origin=fields.origin,
        layer=layer,
        target_hidden_size=fields.integer("target_hidden_size", layer.hidden_size),
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size),
        aux_layer_ids=read_aux_ids(fields),
        # speculators means true when it says nothing; every raw writer means false.
        norm_before_residual=fields.flag("norm_before_residual", nested is not None),
        norm_before_fc=_either_flag(fields, "norm_before_fc"),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
    )
    if config.fc_norm and config.norm_before_fc:
        raise fields.refusal("fc_norm", "either fc_norm or norm_before_fc, not both")
    return config


def _read_layer(fields: Fields) -> ModelConfig:
    if fields.integer("num_hidden_layers", 1) != 1:
        raise fields.refusal("num_hidden_layers", "only 1 (listening needs a one-layer drafter)")
    refuse_sliding(fields)
    model_type = fields.text("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise fields.refusal("model_type", "a drafter's layer is llama or qwen3")
    if model_type == "llama" and fields.has("sliding_window") and not fields.has("layer_types"):
        raise fields.refusal("sliding_window", "only null: the drafter attends to the whole context")
    values = {"num_hidden_layers": 1} | dict(fields.values)
    return read_decoder(
        Fields(values, fields.origin),
        architecture="Eagle3",
        qkv_bias=False,
        qk_norm=model_type == "qwen3",
        window=None,
    )


def _refuse_variants(fields: Fields) -> None:
    for name in ("bias", "parallel_drafting"):
        if fields.flag(name, False):
            raise fields.refusal(name, "only false")
    kind = fields.text("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise fields.refusal("speculators_model_type", "only eagle3")
    eagle = fields.section("eagle_config")
    if eagle is not None and not eagle.flag("use_aux_hidden_state", True):
        raise eagle.refusal("use_aux_hidden_state", "only true (EAGLE-1 and EAGLE-2 drafters are not supported)")


def _either_flag(fields: Fields, name: str) -> bool:
    """A switch some writers put at the top and others in eagle_config."""
    eagle = fields.section("eagle_config")
    return fields.flag(name, eagle.flag(name, False) if eagle is not None else False)


def read_aux_ids(fields: Fields) -> tuple[int, ...] | None:
    """Aux layer ids in our numbering; CheckpointError when the two places they are written disagree."""
    top, eagle = fields.integers(AUX_IDS), fields.section("eagle_config")
    nested = eagle.integers(AUX_IDS) if eagle is not None else None
    if nested is None:
        return top
    from_nested = tuple(layer + 1 for layer in nested)
    if top is not None and top != from_nested:
        raise CheckpointError(
            f"{fields.origin}: {AUX_IDS}={list(top)} (residual entering layer k) and eagle_config.{AUX_IDS}="
            f"{list(nested)} (output of layer k) name different layers: the nested ids must be one lower each"
        )
    return from_nested


def default_aux_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layer."""
    return (2, num_layers // 2, num_layers - 3)


def fit_to_target(config: DraftConfig, target: ModelInfo) -> tuple[int, ...]:
    """The aux layer ids; CheckpointError naming the field when the drafter was made for another target."""
    for field, value, wanted in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.layer.vocab_size, target.vocab_size),
    ):
        if value != wanted:
            raise CheckpointError(
                f"{config.origin}: {field}={value} does not fit the target {target.architecture}, which has {wanted}: "
                "this drafter was made for another model"
            )
    if config.draft_vocab_size > target.vocab_size:
        raise CheckpointError(
            f"{config.origin}: draft_vocab_size={config.draft_vocab_size} exceeds the target's {target.vocab_size}"
        )
    return _fitting_ids(config, target.num_layers)


def _fitting_ids(config: DraftConfig, num_layers: int) -> tuple[int, ...]:
    ids = config.aux_layer_ids or default_aux_ids(num_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        raise CheckpointError(
            f"{config.origin}: {AUX_IDS}={list(ids)} does not fit a target of {num_layers} layers: expected rising ids "
            f"from 0 to {num_layers}"
        )
    return ids
