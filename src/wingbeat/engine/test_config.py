"""EngineConfig: what is wrong is said by name, value and what is allowed, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.engine.config import EngineConfig
from wingbeat.errors import ConfigError
from wingbeat.spec.plan import chain
from wingbeat.spec.policy import Always, Threshold


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"policy": "fancy"}, "policy", "expected one of off, always"),
        ({"policy": "threshold:x"}, "policy", "threshold:N"),
        ({"policy": "always:chain(99)"}, "policy", "depth=99: an integer from 0 to 16"),
        ({"policy": "always:hop(3)"}, "policy", "plan='hop(3)': expected off, chain(k)"),
        ({"policy": "table:4-1=off"}, "policy", "LO-HI=PLAN"),
        ({"speculative_plan": "hop(3)"}, "speculative_plan", "expected off, chain(k)"),
        ({"speculative_plan": "tree(2,2,50)"}, "speculative_plan", "nodes=50"),
        ({"speculative_disable_batch_threshold": -1}, "speculative_disable_batch_threshold", ">= 0"),
        ({"speculative_disable_batch_threshold": 4, "policy": "off"}, "policy", "not together with"),
        ({"max_num_seqs": 0}, "max_num_seqs", "from 1 to 1024"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", "(0, 1]"),
        ({"dtype": "int8"}, "dtype", "bfloat16"),
    ],
)
def test_wrong_settings_name_field_value_and_what_is_allowed(settings: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={settings[field]!r} is not valid: ") and said in str(caught.value)


def test_the_first_policy_is_the_threshold_where_one_is_given() -> None:
    config = EngineConfig(speculative_disable_batch_threshold=4, speculative_plan="chain(2)")
    assert config.first_policy() == Threshold(4, chain(2))
    assert EngineConfig(policy="always", speculative_plan="chain(2)").first_policy() == Always(chain(2))
    assert config.read_policy("threshold:9").spec == "threshold:9:chain(2)"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "default"),
        ({"load_format": "dummy"}, None),
        ({"model": "other"}, None),
        ({"speculative_model": "none"}, None),
        ({"model": "other", "speculative_model": "some/drafter"}, "some/drafter"),
    ],
)
def test_the_shipped_drafter_is_taken_for_its_model_only(settings: dict[str, Any], name: str | None) -> None:
    assert EngineConfig(**settings).drafter_name == name
