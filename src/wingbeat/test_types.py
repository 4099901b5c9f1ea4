from __future__ import annotations

import pytest

from wingbeat.errors import ConfigError, RequestError, unknown_name
from wingbeat.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("stop", ("",)),
        ("stop_token_ids", tuple(range(65))),
        ("logit_bias", {3: 101.0}),
        ("logprobs", 21),
        ("max_draft_depth", -1),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"max_tokens": None, "min_tokens": 5000},
        {"max_tokens": 1, "min_tokens": 1, "logprobs": 0, "max_draft_depth": 0, "seed": -(2**63)},
    ],
)
def test_limits_themselves_are_allowed(params: dict[str, float | int | None]) -> None:
    SamplingParams(**params)


def test_unknown_names_come_with_the_nearest() -> None:
    error = unknown_name("policy", "atuo", ["off", "auto"])
    assert isinstance(error, ConfigError)
    assert "did you mean 'auto'" in str(error)
    assert "did you mean" not in str(unknown_name("policy", "zzz", ["off", "auto"]))
