"""GGUF: a file written by the gguf package converts to the directory it came from, once; other kinds are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from wingbeat.errors import CheckpointError
from wingbeat.models import gguf
from wingbeat.models.gguf import OUTER_NAMES, converted_directory, interleaved_to_halves
from wingbeat.models.load import load_target, read_config
from wingbeat.text.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 8, 48
TOKENS = ["<|end|>", "<|user|>", *(chr(c) for c in range(33, 127)), "\u0120", "he", "\u0120he", "<note>"]
KINDS = [3, 3, *[1] * (len(TOKENS) - 3), 4]
BLOCK = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "wingbeat"


def nothing(writer: GGUFWriter) -> None:
    pass


def write_gguf(path: Path, extra: Callable[[GGUFWriter], None] = nothing, *, arch: str = "llama") -> dict[str, Tensor]:
    """A one-layer Llama; returns the tensors as written."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["h e", "\u0120 he"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    generator = np.random.default_rng(5)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in BLOCK.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    tensors = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


def test_config_and_tensors(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "tiny.gguf")
    directory = converted_directory(tmp_path / "tiny.gguf", torch.float32)
    config, tensors = read_config(directory), load_file(directory / "model.safetensors")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (1, HIDDEN, INNER)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rope.theta, config.max_position_embeddings, config.tied) == (5000.0, 64, True)
    assert config.eos_token_ids == (0,)
    assert len(tensors) == len(written)
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], written["blk.0.ffn_down.weight"])
    assert torch.equal(tensors["model.embed_tokens.weight"], written["token_embd.weight"])
    assert load_target(tmp_path / "tiny.gguf", dtype=torch.float64).info.dtype == torch.float64


def test_rotary_rows_come_back_in_order(tmp_path: Path) -> None:
    """GGUF stores a head's rows as 0, D/2, 1, D/2 + 1, ...; we need 0, 1, 2, ..."""
    interleaved = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17]).unsqueeze(1)
    assert interleaved_to_halves(interleaved, 2).squeeze(1).tolist() == [*range(8), *range(10, 18)]
    written = write_gguf(tmp_path / "tiny.gguf")
    tensors = load_file(converted_directory(tmp_path / "tiny.gguf", torch.float32) / "model.safetensors")
    key = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(key[:4], written["blk.0.attn_k.weight"][0:8:2])
    assert torch.equal(key[4:8], written["blk.0.attn_k.weight"][1:8:2])
    assert torch.equal(tensors["model.layers.0.self_attn.v_proj.weight"], written["blk.0.attn_v.weight"])


def test_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.for_model(converted_directory(tmp_path / "tiny.gguf", None))
    ids = tokenizer.encode("<|user|>he he 12<note>")
    assert [TOKENS[i] for i in ids] == ["<|user|>", "he", "\u0120he", "\u0120", "1", "2", "<note>"]
    assert tokenizer.decode(ids) == "he he 12<note>"
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.template is not None
    assert tokenizer.template.render([{"role": "user", "content": "x"}]) == "x"


def test_converted_once_and_kept_per_precision(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = converted_directory(path, None)
    assert first.parent == cache
    assert load_file(first / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert converted_directory(path, torch.float32) != first
    monkeypatch.setattr(gguf, "convert", None)  # a second conversion would fail
    assert converted_directory(path, torch.bfloat16) == first
    assert not list(cache.glob(".partial-*"))


def test_unwritable_cache_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert gguf.cache_root().parent == tmp_path


def add_bias(writer: GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(HEADS * HEAD_DIM, dtype=np.float32))


def add_rope_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, dtype=np.float32))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (add_bias, r"blk\.0\.attn_q\.bias are not part"),
        (add_rope_factors, r"rope_freqs\.weight are not part"),
        (lambda writer: writer.add_expert_count(8), r"llama\.expert_count=8 .*mixture"),
        (lambda writer: writer.add_tokenizer_pre("tekken"), r"tokenizer\.ggml\.pre='tekken'"),
        (lambda writer: writer.add_tokenizer_model("llama"), r"tokenizer\.ggml\.model='llama' .*byte-level BPE"),
    ],
)
def test_what_cannot_be_served_is_refused(extra: Callable[[GGUFWriter], None], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra)
    with pytest.raises(CheckpointError, match=message):
        converted_directory(tmp_path / "tiny.gguf", None)


def test_other_architectures_and_files_are_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "qwen.gguf", arch="qwen2")
    with pytest.raises(CheckpointError, match=r"general\.architecture='qwen2'"):
        converted_directory(tmp_path / "qwen.gguf", None)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        converted_directory(tmp_path / "text.gguf", None)
    assert list(cache.iterdir()) == []


def test_every_outer_name_is_known() -> None:
    assert {gguf.hf_name(name) for name in OUTER_NAMES} == set(OUTER_NAMES.values())
    assert gguf.hf_name("blk.7.ffn_up.weight") == "model.layers.7.mlp.up_proj.weight"
    assert gguf.hf_name("blk.7.ffn_gate_inp.weight") is None
