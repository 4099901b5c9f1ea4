"""Detokenizer: pieces equal the whole, whatever the batching; stop strings across tokens and characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from wingbeat.text.detokenize import Detokenizer
from wingbeat.text.tokenizer import Tokenizer
from wingbeat.types import SamplingParams


def byte_tokenizer() -> Tokenizer:
    """All 256 bytes as tokens, two merges, and <eos> (id 258)."""
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<eos>"})


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]


def chunked(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(tokens) + 1) for cut in cuts}), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


def streamed(tokens: list[int], cuts: list[int], params: SamplingParams) -> tuple[list[str], str | None, int]:
    """The pieces, the stop string and the number of tokens kept."""
    detokenizer, pieces, kept = Detokenizer(TOKENIZER, params), [], 0
    for chunk in chunked(tokens, cuts):
        update = detokenizer.append(chunk)
        pieces.append(update.text)
        kept += update.num_tokens_kept
        if update.stop is not None:
            return pieces, update.stop, kept
    return [*pieces, detokenizer.finish()], None, kept


TOKENS = st.lists(st.integers(0, EOS), max_size=30)
CUTS = st.lists(st.integers(0, 100), max_size=8)


@given(TOKENS, CUTS, st.booleans())
def test_pieces_join_to_the_one_shot_decode_of_any_bytes(tokens: list[int], cuts: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip, ignore_eos=True)
    pieces, stop, kept = streamed(tokens, cuts, params)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=skip)
    assert stop is None and kept == len(tokens)


@given(st.text(max_size=12), CUTS)
def test_only_whole_characters_come_out(text: str, cuts: list[int]) -> None:
    pieces, _, _ = streamed(TOKENIZER.encode(text), cuts, SamplingParams())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


STOPS = st.lists(st.text(alphabet="abc\u00e9", min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.text(alphabet="abc\u00e9", max_size=20), STOPS, CUTS, st.booleans(), st.integers(0, 6))
def test_stops_do_not_depend_on_batching(text: str, stops: list[str], cuts: list[int], shown: bool, least: int) -> None:
    tokens = TOKENIZER.encode(text)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=shown, min_tokens=least, max_tokens=None)
    pieces, stop, kept = streamed(tokens, cuts, params)
    expected, expected_stop, expected_kept = reference(tokens, stops, shown, least)
    assert ("".join(pieces), stop, kept) == (expected, expected_stop, expected_kept)


def reference(tokens: list[int], stops: list[str], shown: bool, least: int) -> tuple[str, str | None, int]:
    """Decodes everything anew at each token and looks for a stop that ends in its text."""
    for count in range(least + 1, len(tokens) + 1):
        before = len(TOKENIZER.decode(tokens[: count - 1]).rstrip("\ufffd"))
        text = TOKENIZER.decode(tokens[:count]).rstrip("\ufffd")
        found = [(text.find(s, max(before - len(s) + 1, 0)), s) for s in stops]
        hits = [(start, s) for start, s in found if start >= 0]
        if hits:
            start, stop = min(hits, key=lambda hit: hit[0])
            return text[: start + len(stop) * shown], stop, count
    return TOKENIZER.decode(tokens), None, len(tokens)


def test_a_stop_may_begin_anywhere_and_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=("abcab",)))
    texts = [detokenizer.append(TOKENIZER.encode(t)).text for t in ("xa", "b", "c", "x")]
    assert texts == ["x", "", "", "abcx"]


def test_a_stop_says_how_many_tokens_belong() -> None:
    update = Detokenizer(TOKENIZER, SamplingParams(stop=("c",))).append(TOKENIZER.encode("x") + TOKENIZER.encode("bcx"))
    assert (update.text, update.stop, update.num_tokens_kept) == ("xb", "c", 2)  # "bc" is one token


@pytest.mark.parametrize(("shown", "text"), [(False, "x"), (True, "xa")])
def test_stop_tokens_give_no_text_unless_asked_for(shown: bool, text: str) -> None:
    (stop_id,) = TOKENIZER.encode("a")
    params = SamplingParams(stop_token_ids=(stop_id,), include_stop_str_in_output=shown)
    assert Detokenizer(TOKENIZER, params).append([*TOKENIZER.encode("x"), stop_id]).text == text


def test_finish_releases_what_was_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=("abc",)))
    assert detokenizer.append(TOKENIZER.encode("xab")).text == "x"
    assert detokenizer.finish() == "ab"
