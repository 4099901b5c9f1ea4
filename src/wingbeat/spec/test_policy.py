from __future__ import annotations

import pytest

from wingbeat.errors import ConfigError
from wingbeat.spec.cost import CostTable, Curve, StepCosts
from wingbeat.spec.plan import OFF, chain, parse_rule, tree
from wingbeat.spec.policy import Always, Auto, LoadSnapshot, Table, Threshold, parse_policy
from wingbeat.spec.stats import AcceptStats, Observation


def load(num_running: int, prefill_rows: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        num_running=num_running, num_decode=num_running, prefill_rows=prefill_rows,
        total_context=100 * num_running,
    )  # fmt: skip


def costs(knee: int) -> CostTable:
    """Rows are free up to `knee`, then cost 1 ms each."""
    verify = Curve((1, knee, knee + 1000), (0.010, 0.010, 1.010))
    flat = Curve((1,), (0.001,))
    return CostTable(StepCosts(verify=verify, draft_level=flat, rest=Curve((1,), (0.0,)), context_slope=0.0))


def stats(depth: int, matched: int) -> AcceptStats:
    seen = AcceptStats()
    seen.observe([Observation(chain(depth), depth, matched)] * 300)
    return seen


@pytest.mark.parametrize("text", ["off", "chain(3)", "tree(5,4,16)", "tree(3,2,8)"])
def test_rules_round_trip(text: str) -> None:
    assert str(parse_rule(text)) == text


@pytest.mark.parametrize("text", ["on", "chain", "chain(0)", "chain(99)", "tree(5,4,5)", "tree(2,2,9)", "tree(1,2)"])
def test_bad_rules_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        parse_rule(text)


@pytest.mark.parametrize(
    "text",
    ["off", "auto", "always:chain(3)", "always:tree(5,4,16)", "threshold:4:chain(2)", "table:1-4=chain(3),5-=off"],
)
def test_policies_round_trip(text: str) -> None:
    assert parse_policy(text, chain(3)).spec == text


@pytest.mark.parametrize("text", ["", "fast", "off:1", "threshold", "threshold:x", "table:", "table:4-1=off", "auto:3"])
def test_unknown_policies_name_the_allowed_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"policy=|plan="):
        parse_policy(text, chain(3))


@pytest.mark.parametrize("ranges", ["1-4=chain(3),3-8=off", "5-=off,1-6=chain(1)", "1-=off,9-9=chain(2)"])
def test_ranges_of_a_table_that_overlap_are_named(ranges: str) -> None:
    spans = sorted(part.split("=")[0] for part in ranges.split(","))
    with pytest.raises(ConfigError, match=f"{spans[0]} and {spans[1]} overlap"):
        parse_policy(f"table:{ranges}", chain(3))


def test_defaults_fill_the_plan() -> None:
    assert parse_policy("always", chain(2)) == Always(chain(2))
    assert parse_policy("threshold:4", tree(3, 2, 8)) == Threshold(4, tree(3, 2, 8))


def test_threshold_and_table_go_by_running_sequences() -> None:
    threshold = Threshold(4, chain(3))
    assert [threshold.choose(load(n), AcceptStats(), None).rule for n in (4, 5)] == [chain(3), OFF]
    table = Table(((1, 2, chain(3)), (4, None, chain(1))))
    rules = [table.choose(load(n), AcceptStats(), None).rule for n in (1, 2, 3, 4, 400)]
    assert rules == [chain(3), chain(3), OFF, chain(1), chain(1)]


def test_auto_speculates_while_rows_are_free_and_stops_when_they_cost() -> None:
    good = stats(8, 6)
    assert Auto().choose(load(1), good, costs(64)).rule.depth >= 4
    assert Auto().choose(load(60), good, costs(64)).rule == OFF
    assert Auto().choose(load(1), stats(8, 0), costs(64)).rule == OFF


def test_auto_does_not_draft_deeper_because_a_prefill_makes_the_step_long() -> None:
    """Tokens / seconds of the step itself would say chain(8)."""
    unseen = AcceptStats()
    assert Auto().choose(load(1), unseen, costs(2)).rule == chain(2)
    assert Auto().choose(load(1, prefill_rows=2000), unseen, costs(2)).rule == chain(2)


def test_auto_follows_what_serving_teaches_about_cost() -> None:
    table, good = costs(64), stats(8, 6)
    for _ in range(100):
        for rule in [chain(k) for k in range(1, 9)]:
            table.observe(1, rule, 3 * table.costs.step(1, rule), total_context=0)
        table.observe(1, OFF, 0.3 * table.costs.step(1, OFF), total_context=0)
    assert Auto().choose(load(1), good, table).rule == OFF


def test_expected_tokens_is_the_sum_of_reach_probabilities() -> None:
    seen = stats(3, 2)
    alphas = seen.conditional(3)
    assert alphas[0] > 0.97 and alphas[1] > 0.97 and alphas[2] < 0.03
    expected = 1 + alphas[0] + alphas[0] * alphas[1] + alphas[0] * alphas[1] * alphas[2]
    assert seen.expected_tokens(chain(3)) == pytest.approx(expected)
    assert seen.expected_tokens(OFF) == 1.0


def test_estimates_follow_the_traffic() -> None:
    seen = stats(3, 3)
    seen.observe([Observation(chain(3), 3, 0)] * 2000)
    assert seen.conditional(1)[0] < 0.05


def test_curve_interpolates_and_extends() -> None:
    curve = Curve((1, 3, 5), (1.0, 2.0, 4.0))
    assert [curve(x) for x in (0, 1, 2, 4, 7)] == pytest.approx([1.0, 1.0, 1.5, 3.0, 6.0])
