"""The tokenizer inside a GGUF file, as the tokenizer.json and tokenizer_config.json of a Hugging Face directory."""

from __future__ import annotations

import json
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from wingbeat.models.fields import Fields

CONTROL, USER_DEFINED = 3, 4
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(metadata: Fields) -> dict[str, str]:
    """File name -> content. CheckpointError for tokenizers other than byte-level BPE."""
    if metadata.text("tokenizer.ggml.model", "") != "gpt2":
        raise metadata.refusal("tokenizer.ggml.model", "only gpt2 (byte-level BPE); use a Hugging Face directory")
    files = {
        "tokenizer.json": build_tokenizer(metadata).to_str(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(metadata), indent=1),
    }
    if metadata.has("tokenizer.chat_template"):
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template")
    return files


def build_tokenizer(metadata: Fields) -> Tokenizer:
    """A byte-level BPE tokenizer from the file's tokens, merges and pre-tokenizer name."""
    tokens, pre = _strings(metadata, "tokenizer.ggml.tokens"), metadata.text("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = BPE(vocab=vocab, merges=cast(list[tuple[str, str]], merges), ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata, pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(metadata, tokens, CONTROL))
    tokenizer.add_tokens(_added(metadata, tokens, USER_DEFINED))
    bos = metadata.values.get("tokenizer.ggml.bos_token_id")
    if isinstance(bos, int) and metadata.flag("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(metadata: Fields, pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":  # digits one by one, then GPT-2's split
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, byte_level])
    raise metadata.refusal("tokenizer.ggml.pre", "only smollm, gpt-2 or llama-bpe; use a Hugging Face directory")


def _added(metadata: Fields, tokens: list[str], kind: int) -> list[AddedToken]:
    """Tokens of one kind, matched as written in the text."""
    kinds = metadata.integers("tokenizer.ggml.token_type") or ()
    names = [token for token, token_kind in zip(tokens, kinds, strict=False) if token_kind == kind]
    return [AddedToken(name, normalized=False, special=kind == CONTROL) for name in names]


def _tokenizer_config(metadata: Fields) -> dict[str, object]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    ids = {
        name: metadata.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")
    }
    config: dict[str, object] = {
        {"unknown": "unk", "padding": "pad"}.get(name, name) + "_token": tokens[token_id]
        for name, token_id in ids.items()
        if isinstance(token_id, int)
    }
    return config | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def _strings(metadata: Fields, name: str) -> list[str]:
    value = metadata.values.get(name)
    if not isinstance(value, list):
        raise metadata.refusal(name, "expected a list of strings")
    return cast(list[str], value)
