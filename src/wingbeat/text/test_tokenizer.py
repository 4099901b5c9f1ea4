"""Tokenizer: ids, bytes, special ids and end-of-sequence ids of model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from wingbeat.errors import CheckpointError
from wingbeat.text.tokenizer import Tokenizer, byte_level_table

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["he", "\u0120he"]
SPECIAL = ["<s>", "</s>", "<|eot|>"]


def byte_level() -> tokenizers.Tokenizer:
    """All bytes, two merges, three special tokens and a plain added one; a plain prompt starts with <s>."""
    vocab = {token: index for index, token in enumerate([*ALPHABET, *MERGED])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("\u0120", "he")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["<think>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return backend


def save(directory: Path, **files: object) -> Path:
    byte_level().save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": "{{ bos_token }}"}
    return Tokenizer.for_model(save(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [258, 260]}))


def test_special_tokens_and_end_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_id(name) for name in SPECIAL] == [258, 259, 260]
    assert tokenizer.special_ids == {258, 259, 260}
    assert tokenizer.bos_token_id == 258
    assert tokenizer.eos_token_ids == (258, 260, 259)
    assert tokenizer.vocab_size == 262
    assert tokenizer.token_id("nothing") is None


def test_config_gives_end_ids_where_generation_config_does_not(tmp_path: Path) -> None:
    assert Tokenizer.for_model(save(tmp_path, config={"eos_token_id": 259})).eos_token_ids == (259,)
    assert Tokenizer.for_model(save(tmp_path, config={}, generation_config={})).eos_token_ids == ()


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("he he")
    assert ids == [258, 256, 257]
    assert tokenizer.encode("he he", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode("<|eot|>he", add_special_tokens=False) == [260, 256]
    assert tokenizer.decode(ids) == "he he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>he he"
    assert tokenizer.decode(tuple(tokenizer.encode("<think>", add_special_tokens=False))) == "<think>"


@given(st.text())
def test_no_text_has_fewer_tokens_than_said(text: str) -> None:
    tokenizer = Tokenizer(byte_level(), special_tokens={})
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_fewest_tokens_grows_with_the_text(tokenizer: Tokenizer) -> None:
    longest = len("<think>")
    assert tokenizer.fewest_tokens("<think>" * 50) == 50 and tokenizer.fewest_tokens("x" * (longest - 1)) == 0


@given(st.text())
def test_token_bytes_make_up_the_text(text: str) -> None:
    tokenizer = Tokenizer(byte_level(), special_tokens={})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_parts_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\u20ac", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""


def test_byte_level_table_is_the_library_alphabet() -> None:
    assert sorted(byte_level_table()) == ALPHABET
    assert sorted(byte_level_table().values()) == list(range(256))


def test_sentencepiece_style_tokens() -> None:
    vocab = {"<unk>": 0, "\u2581the": 1, "<0xE2>": 2, "a": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = Tokenizer(backend, special_tokens={})
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b" the", b"\xe2", b"a"]


def test_template_comes_along(tokenizer: Tokenizer) -> None:
    assert tokenizer.template is not None
    assert tokenizer.template.render([{"role": "user", "content": "x"}]) == "<s>"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.for_model(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.for_model(tmp_path)
