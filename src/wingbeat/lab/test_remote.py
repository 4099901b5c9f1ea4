"""Counters read from a server's metrics page, of Wingbeat and of vLLM."""

from __future__ import annotations

import pytest

from wingbeat.lab.measures import PositionRate, accept_len, acceptance_by_position
from wingbeat.lab.remote import parse_metrics, speculation_in, time_in

BEFORE = """
# HELP wingbeat:generation_tokens_total tokens generated
# TYPE wingbeat:generation_tokens_total counter
wingbeat:generation_tokens_total{model_name="m"} 100.0
wingbeat:spec_decode_num_drafts_total{model_name="m"} 10.0
wingbeat:spec_decode_num_accepted_tokens_total{model_name="m"} 40.0
wingbeat:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 9.0
wingbeat:step_time_seconds_total{model_name="m",part="draft"} 1.5
"""
AFTER = """
wingbeat:generation_tokens_total{model_name="m"} 160.0
wingbeat:spec_decode_num_drafts_total{model_name="m"} 30.0
wingbeat:spec_decode_num_accepted_tokens_total{model_name="m"} 70.0
wingbeat:spec_decode_num_draft_tokens_total{model_name="m"} 60.0
wingbeat:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 25.0
wingbeat:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 8.0
wingbeat:spec_decode_num_draft_tokens_per_pos_total{model_name="m",position="0"} 20.0
wingbeat:spec_decode_num_draft_tokens_per_pos_total{model_name="m",position="1"} 20.0
wingbeat:step_time_seconds_total{model_name="m",part="draft"} 2.0
wingbeat:step_time_seconds_total{model_name="m",part="verify"} 3.0
"""


def test_a_block_is_the_difference_of_two_pages() -> None:
    gained = parse_metrics(AFTER).since(parse_metrics(BEFORE))
    use = speculation_in(gained)
    assert use is not None
    assert (use.num_tokens, use.num_accepted_drafts, use.num_target_forwards) == (60, 30, 30)
    assert accept_len(use) == 2.0
    assert use.accepted_per_pos == (16, 8)
    assert acceptance_by_position(use) == (PositionRate(0.8, 0.8, 20), PositionRate(0.5, 0.4, 16))
    spent = time_in(gained)
    assert spent is not None
    assert (spent.draft_s, spent.verify_s, spent.host_s) == (0.5, 3.0, 0.0)


def test_engines_are_summed_and_names_lose_their_prefix() -> None:
    page = 'vllm:generation_tokens_total{engine="0"} 3\nvllm:generation_tokens_total{engine="1"} 4e0\n'
    assert parse_metrics(page).total("generation_tokens_total") == 7.0


def test_a_server_that_does_not_count_yields_nothing() -> None:
    empty = parse_metrics("# nothing\nprocess_cpu_seconds_total 3.0\n")
    assert speculation_in(empty) is None
    assert time_in(empty) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_odd_values_are_read(value: str) -> None:
    assert parse_metrics(f"wingbeat:x {value}\n").has("x")
