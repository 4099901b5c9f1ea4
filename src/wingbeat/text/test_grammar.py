"""Grammar masks: exactly the tokens that keep the text inside the schema, after any in-flight path."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from wingbeat.errors import RequestError
from wingbeat.text.grammar import MAX_CACHED, GrammarCompiler, Matcher
from wingbeat.text.test_detokenize import EOS, TOKENIZER

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
COMPILER = GrammarCompiler(TOKENIZER)


def matcher(schema: str = SCHEMA, committed: str = "") -> Matcher:
    found = COMPILER.compile(schema).matcher()
    found.advance(TOKENIZER.encode(committed))
    return found


def allowed(found: Matcher, path: str = "") -> set[str | int]:
    """Characters (and EOS) that the mask after a path lets through."""
    (mask,) = found.bitmasks([TOKENIZER.encode(path)])
    ids = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return {token if token == EOS else TOKENIZER.token_text(token) for token in ids}


def test_masks_follow_the_in_flight_path() -> None:
    found = matcher(committed='{"')
    assert allowed(found) == {"a"}
    assert allowed(found, 'a":"') == {"x", "y"}
    assert allowed(found, 'a":"y') == {"y"}
    assert allowed(found) == {"a"}, "a walk leaves no trace"


def test_all_paths_of_a_tree_at_once() -> None:
    found = matcher(committed='{"a":')
    paths = [TOKENIZER.encode(path) for path in ("", '"', '"x', '"y', '"x"}')]
    masks = found.bitmasks(paths)
    assert masks.shape == (5, 9) and masks.dtype == np.int32
    one_by_one = np.concatenate([found.bitmasks([path]) for path in paths])
    assert (masks == one_by_one).all()


def test_the_end_is_allowed_exactly_when_complete() -> None:
    found = matcher(committed='{"a":"x"')
    assert EOS not in allowed(found) and not found.is_complete()
    assert allowed(found, "}") == {EOS}
    found.advance(TOKENIZER.encode("}"))
    assert found.is_complete() and allowed(found) == {EOS}
    found.advance([EOS])
    assert allowed(found) == {EOS}


def test_after_a_broken_path_only_the_end_is_left() -> None:
    found = matcher(committed='{"')
    assert allowed(found, "z") == {EOS}
    assert allowed(found, 'a":z') == {EOS}
    assert allowed(found) == {"a"}


def test_choices_do_not_share_state() -> None:
    one, two = matcher(committed='{"a":"'), matcher(committed='{"')
    assert allowed(one) == {"x", "y"} and allowed(two) == {"a"}


def test_empty_schema_is_any_object() -> None:
    assert "{" in allowed(matcher("{}")) and "[" not in allowed(matcher("{}"))
    assert matcher("{}", '{"deep": {"x": [1, null]}}').is_complete()


def test_following_the_mask_gives_valid_json() -> None:
    """Sampling uniformly among allowed tokens ends in an object that fits the schema."""
    rng = np.random.default_rng(0)
    found, text = matcher(), bytearray()
    for _ in range(200):
        (mask,) = found.bitmasks([[]])
        token = int(rng.choice(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]))
        if token == EOS:
            break
        found.advance([token])
        text += TOKENIZER.token_bytes(token)
    assert json.loads(text)["a"] in ("x", "yy")


def test_threads_may_compile_at_once() -> None:
    """More schemas than are kept, from many threads: every one comes out right, and the last ones are found again."""
    compiler = GrammarCompiler(TOKENIZER)
    compiler.prepare()
    schemas = [json.dumps({"enum": [f"{i:03d}"]}) for i in range(MAX_CACHED + 16)] * 3

    def first_digits(schema: str) -> str:
        found = compiler.compile(schema).matcher()
        text = ""
        for _ in range(5):
            (text,) = (text + token for token in allowed(found, text))
        return text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(first_digits, schemas)) == [json.loads(schema)["enum"][0].join('""') for schema in schemas]
    assert len(compiler._compiled) == MAX_CACHED
    kept = next(reversed(compiler._compiled))
    assert compiler.compile(kept) is compiler.compile(kept)


@pytest.mark.parametrize("schema", ["{", "[1]", '{"type": "objec"}', '{"type": "string", "format": "zzz"}'])
def test_unsupported_schemas_are_refused_with_the_reason(schema: str) -> None:
    with pytest.raises(RequestError, match="response_format"):
        COMPILER.compile(schema)
