"""Architecture name -> how its config is read and what its layers are made of; what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from wingbeat.errors import CheckpointError
from wingbeat.kernels.interface import LayerWeights
from wingbeat.models import llama, qwen
from wingbeat.models.config import ModelConfig, architecture_name
from wingbeat.models.fields import Fields
from wingbeat.models.llama import ReadTensor, Shapes


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported decoder: config reader, shapes of a layer's tensors, and the layer's weights."""

    read_config: Callable[[Fields], ModelConfig]
    layer_shapes: Callable[[ModelConfig, int | None], Shapes]
    layer_weights: Callable[[ReadTensor], LayerWeights]


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama.read_llama, llama.layer_shapes, llama.layer_weights),
    "MistralForCausalLM": Architecture(llama.read_mistral, llama.layer_shapes, llama.layer_weights),
    "Qwen2ForCausalLM": Architecture(qwen.read_qwen2, qwen.qwen2_shapes, qwen.qwen2_weights),
    "Qwen3ForCausalLM": Architecture(qwen.read_qwen3, qwen.qwen3_shapes, qwen.qwen3_weights),
}


def find_architecture(name: str, origin: str) -> Architecture:
    """The entry for `name`; CheckpointError saying which exist and why this one is not among them."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    supported = ", ".join(ARCHITECTURES)
    raise CheckpointError(f"{origin}: architecture {name!r} is not supported{_reason(name)}; supported: {supported}")


def _reason(name: str) -> str:
    if name.startswith(("Deepseek", "Kimi")):
        return " (MLA attention and mixture-of-experts layers: serve it through vLLM or SGLang)"
    if "Moe" in name or "MoE" in name or name.startswith("Mixtral"):
        return " (mixture-of-experts layers: serve it through vLLM or SGLang)"
    if "Eagle" in name:
        return " as a target (it is a drafter)"
    near = get_close_matches(name, ARCHITECTURES, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def read_model_config(fields: Fields) -> ModelConfig:
    """The checked config of a target model."""
    return find_architecture(architecture_name(fields), fields.origin).read_config(fields)
