"""GGUF (Llama only): one file in, a Hugging Face style directory out, kept in the user's cache.

Converting once keeps a single loading path, and later starts skip about 4 s of parsing and dequantising (SmolLM2-135M).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.errors import CheckpointError
from wingbeat.models.checkpoint import file_digest
from wingbeat.models.fields import Fields
from wingbeat.models.gguf_tokenizer import tokenizer_files

FORMAT = 1
"""Part of the cache key: raise it when the conversion changes."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def converted_directory(path: Path, dtype: torch.dtype | None) -> Path:
    """The directory holding `path` as config.json, model.safetensors and tokenizer files; made on first use.

    Quantised values are kept in float32 when float32 or float64 is asked for and rounded to bfloat16 otherwise.
    """
    kept = torch.float32 if dtype in (torch.float32, torch.float64) else torch.bfloat16
    name = f"{path.stem}-{file_digest(path)[:16]}-{str(kept).removeprefix('torch.')}-v{FORMAT}"
    directory = cache_root() / name
    if not (directory / "config.json").is_file():
        _publish(path, kept, directory)
    return directory


def cache_root() -> Path:
    """XDG_CACHE_HOME/wingbeat (or ~/.cache/wingbeat); a per-user temporary directory where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wingbeat"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except OSError:
        pass  # a read-only home is fine: fall through to the temporary directory
    fallback = Path(tempfile.gettempdir()) / f"wingbeat-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    return fallback


def _publish(path: Path, dtype: torch.dtype, directory: Path) -> None:
    """Converts beside the final place and renames: another process sees all of it or nothing."""
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory.parent))
    try:
        convert(path, dtype, partial)
        try:
            partial.rename(directory)
        except OSError:
            if not (directory / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert(path: Path, dtype: torch.dtype, directory: Path) -> None:
    """Writes a Llama GGUF as a Hugging Face directory. CheckpointError for other architectures and broken files."""
    reader = _open(path)
    metadata = _metadata(path, reader)
    tensors = read_tensors(path, reader, metadata, dtype)
    config = hf_config(metadata, tensors, dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in tokenizer_files(metadata).items():
        (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from None


def _metadata(path: Path, reader: GGUFReader) -> Fields:
    """All key-value pairs; other architectures are refused here."""
    fields = Fields({name: field.contents() for name, field in reader.fields.items()}, str(path))
    if fields.text("general.architecture", "") != "llama":
        raise fields.refusal("general.architecture", "only llama; use a Hugging Face directory for other models")
    if fields.has("llama.expert_count"):
        raise fields.refusal("llama.expert_count", "mixture-of-experts models are not supported")
    return fields


def hf_config(metadata: Fields, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, object]:
    """config.json's content for a converted file."""
    heads, hidden = metadata.integer("llama.attention.head_count"), metadata.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "name": metadata.text("general.name", ""),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", heads),
        "head_dim": metadata.integer("llama.attention.key_length", hidden // heads),
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(metadata),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": metadata.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.values.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_parameters(metadata: Fields) -> dict[str, object]:
    theta = metadata.number("llama.rope.freq_base", 10000.0)
    kind = metadata.text("llama.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": metadata.number("llama.rope.scaling.factor")}
    raise metadata.refusal("llama.rope.scaling.type", "only none or linear; use a Hugging Face directory")


def read_tensors(path: Path, reader: GGUFReader, metadata: Fields, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors, dequantised, under Hugging Face names. Names we do not know are a CheckpointError naming them."""
    heads = metadata.integer("llama.attention.head_count")
    kv_heads = metadata.integer("llama.attention.head_count_kv", heads)
    tensors: dict[str, Tensor] = {}
    unknown = [entry.name for entry in reader.tensors if hf_name(entry.name) is None]
    if unknown:
        raise CheckpointError(f"{path}: tensors {', '.join(unknown[:5])} are not part of a Llama model we can serve")
    for entry in reader.tensors:
        name = hf_name(entry.name)
        assert name is not None
        values = torch.tensor(dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        if "q_proj" in name or "k_proj" in name:
            values = interleaved_to_halves(values, heads if "q_proj" in name else kv_heads)
        tensors[name] = values.to(dtype).contiguous()
    return tensors


def hf_name(name: str) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; None when there is no such tensor in Llama."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES or parts[3] != "weight":
        return None
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"


def interleaved_to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """GGUF's Llama rotates neighbouring rows (0,1), (2,3), ...; we rotate row i with row i + D/2. [Hq * D, H]."""
    pairs = rows.view(num_heads, -1, 2, rows.shape[-1])  # [Hq, D/2, 2, H]
    return pairs.transpose(1, 2).reshape(rows.shape)
