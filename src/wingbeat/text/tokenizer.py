"""Tokenizer: text to ids and back, the special ids, and the chat template of one model directory."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import cast

import tokenizers

from wingbeat.errors import CheckpointError
from wingbeat.text.template import ChatTemplate, read_template

JsonObject = dict[str, object]
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer. Ids are the model's own; unknown ids decode to nothing."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = special_tokens
        """Name (bos_token, eos_token, ...) -> its text, as chat templates use them."""
        self.template = template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_ids = _merged(eos_token_ids, self._named_id("eos_token"))
        self._added_texts = {token_id: token.content for token_id, token in added.items()}
        self._byte_level = _is_byte_level(backend)
        self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    @staticmethod
    def for_model(directory: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face style directory, with its chat template if it has one."""
        path = Path(directory)
        config = _read_object(path / "tokenizer_config.json")
        special = _special_tokens(config)
        return Tokenizer(
            _load_backend(path),
            special_tokens=special,
            eos_token_ids=_eos_ids(path),
            template=read_template(path, config, special),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds what the model wants around a plain prompt (a BOS, say)."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's length in tokens, known without reading it; 0 where tokens may stand for any
        number of characters (an unknown-token, say)."""
        return len(text) // self._longest_token if self._byte_level else 0

    def decode(self, token_ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        """The text of a token sequence; bytes that form no character yet come out as U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for in the middle of a text; empty for ids outside the vocabulary."""
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = byte_level_table()
            return bytes(table[char] for char in token if char in table)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD where its bytes are part of a character (logprobs show this)."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of one token as written in the vocabulary."""
        return self.backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return self.token_id(text) if text is not None else None


@lru_cache(maxsize=1)
def byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte: printable Latin-1 stands for itself, the rest follow
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return _convert_backend(directory)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every parse error
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from None


def _convert_backend(directory: Path) -> tokenizers.Tokenizer:
    """Older directories (tokenizer.model, vocab.json + merges.txt) go through transformers' converters."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{directory}: no tokenizer.json, and no other tokenizer can be read: {error}") from None
    backend: object = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{directory}: its tokenizer has no fast form; save a tokenizer.json beside it")
    return backend


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder: JsonObject = json.loads(backend.to_str()).get("decoder") or {}
    nested = cast(list[JsonObject], decoder.get("decoders") or [])
    return any(item.get("type") == "ByteLevel" for item in [decoder, *nested])


def _read_object(path: Path) -> JsonObject:
    """The JSON object in an optional file; empty when there is none."""
    if not path.is_file():
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return cast(JsonObject, value)


def _special_tokens(config: JsonObject) -> dict[str, str]:
    """Special tokens by name; written either as a string or as an object with a `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = cast(JsonObject, value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(directory: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_object(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(item for item in cast(list[object], value) if isinstance(item, int))
    return ()


def _merged(ids: tuple[int, ...], extra: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids if extra is None else (*ids, extra)))
