"""Statistics on simulated data whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from wingbeat.errors import LabError
from wingbeat.lab.best_arm import best_arm_test, half_of
from wingbeat.lab.crossover import Answer, crossover
from wingbeat.lab.stats import holm, holm_levels, overall_ratio, paired_log_ratios, pooled_intervals, pooled_spread

POINTS = (1, 2, 4, 8, 16, 32)


def test_ratios_are_paired_by_block_and_need_both_arms():
    arm = {("coding", 1): {0: 20.0, 1: 40.0, 2: 5.0}, ("chat", 1): {0: 1.0}}
    base = {("coding", 1): {1: 20.0, 0: 20.0, 3: 9.0}}
    ratios = paired_log_ratios(arm, base)
    assert list(ratios) == [("coding", 1)]
    assert np.exp(ratios["coding", 1]) == pytest.approx([1.0, 2.0])


def test_pooled_sd_divides_by_degrees_of_freedom():
    spread = pooled_spread({"a": np.array([1.0, 3.0]), "b": np.array([0.0, 0.0, 3.0])})
    assert spread.degrees == 3
    assert spread.sd == pytest.approx(np.sqrt((2 + 6) / 3))


def test_a_known_interval():
    ratio = pooled_intervals({"a": np.array([-0.1, 0.1])})["a"]
    half = 12.7062 * np.sqrt(0.02) / np.sqrt(2)  # t(0.975, 1)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.0, np.exp(-half), np.exp(half)), rel=1e-4)


def test_one_block_has_no_interval():
    ratio = overall_ratio({"a": np.array([0.0])})
    assert (ratio.low, ratio.high, str(ratio)) == (None, None, "1.00 [?]")
    with pytest.raises(LabError, match="nothing to compare"):
        overall_ratio({})


def test_coverage_of_pooled_intervals_is_nominal():
    rng, hits, total = np.random.default_rng(1), 0, 0
    truth = {c: 0.1 - 0.03 * i for i, c in enumerate(POINTS)}
    for _ in range(400):
        intervals = pooled_intervals({c: m + 0.05 * rng.standard_normal(3) for c, m in truth.items()})
        hits += sum(r.low <= np.exp(truth[c]) <= r.high for c, r in intervals.items())
        total += len(truth)
    assert hits / total == pytest.approx(0.95, abs=0.015)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_levels([0.001, 0.3, 0.02], 0.05) == pytest.approx([1 - 0.05 / 3, 1 - 0.05, 1 - 0.05 / 2])
    assert holm_levels([0.04, 0.3, 0.9], 0.05) == pytest.approx([1 - 0.05 / 3] * 3)


def _curve(rng, crossing, sd, blocks=4, slope=0.15):
    return {c: slope * (np.log2(crossing) - np.log2(c)) + sd * rng.standard_normal(blocks) for c in POINTS}


def test_crossover_of_a_noiseless_line_is_exact():
    found = crossover({c: np.array([v[0], v[0]]) for c, v in _curve(np.random.default_rng(0), 11.0, 0.0).items()})
    assert found.answer is Answer.NUMBER
    assert (found.value, found.low, found.high) == pytest.approx((11.0, 11.0, 11.0))


def test_crossover_interval_covers_the_truth():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        found = crossover(_curve(rng, 6.0, 0.08))
        hits += (found.low or 0) <= 6.0 <= (found.high or 99)
    # Isotonic fitting borrows from the neighbours, the band does not: the interval errs on the wide side.
    assert hits / 300 >= 0.94


def test_crossover_answers_in_words():
    rng = np.random.default_rng(3)
    never = crossover(_curve(rng, 0.1, 0.01))
    beyond = crossover(_curve(rng, 500.0, 0.01))
    same = crossover({c: 0.002 * rng.standard_normal(4) for c in POINTS})
    assert (never.answer, beyond.answer, same.answer) == (Answer.NEVER, Answer.BEYOND, Answer.SAME)
    assert (str(never), str(beyond), str(same)) == ("never pays", "beyond C = 32", "indistinguishable")


def test_a_wide_band_is_told():
    rng = np.random.default_rng(3)
    assert "<" in str(crossover(_curve(rng, 1.4, 0.3))) or ">" in str(crossover(_curve(rng, 1.4, 0.3)))
    assert str(crossover({1: np.array([0.1]), 2: np.array([-0.1])})) == "C = 1.41 [?]"


def _speeds(rng, arms, sd, blocks, cells=12):
    def draw(mean):
        return dict(enumerate(np.exp(mean + sd * rng.standard_normal(blocks))))

    return {arm: {("d", c): draw(mean) for c in range(cells)} for arm, mean in arms.items()}


def test_halves_hold_both_orders():
    halves = [[b for b in range(8) if half_of(b) == h] for h in (0, 1)]
    assert [sorted(b % 2 for b in half) for half in halves] == [[0, 0, 1, 1]] * 2
    assert sum(halves[0]) == sum(halves[1])


@pytest.mark.parametrize("blocks", [2, 4])
def test_equal_arms_are_rarely_called_a_loss_and_the_bias_is_gone(blocks):
    rng = np.random.default_rng(4)
    pooled, naive, false, covered = [], [], 0, 0
    for _ in range(150):
        speeds = _speeds(rng, {"auto": 0.0, "off": 0.0, "chain": 0.0}, 0.05, blocks)
        test = best_arm_test(speeds, "auto", ("off", "chain"), bound=1.0)
        pooled.append(np.log(test.pooled.value))
        covered += test.pooled.low <= 1.0 <= test.pooled.high
        false += bool(test.failed_cells)
        means = {a: np.array([np.mean(np.log([*s.values()])) for s in speeds[a].values()]) for a in speeds}
        naive.append(float(np.mean(means["auto"] - np.maximum(means["off"], means["chain"]))))
    assert false / 150 <= 0.08
    assert covered / 150 >= 0.92
    assert abs(np.mean(pooled)) < 0.002
    assert np.mean(naive) < -0.01


def test_a_true_loss_in_one_cell_is_found_and_named():
    rng = np.random.default_rng(5)
    speeds = _speeds(rng, {"auto": 0.3, "off": 0.0, "chain": 0.3}, 0.02, 4)
    speeds["auto"]["d", 3] = {b: v * 0.8 for b, v in speeds["auto"]["d", 3].items()}
    test = best_arm_test(speeds, "auto", ("off", "chain"), bound=0.97)
    assert test.failed_cells == (("d", 3),)
    assert test.cells["d", 3].p_below < 0.05
    assert test.cells["d", 3].rivals == ("chain", "chain")
    assert test.pooled.value == pytest.approx(0.8 ** (1 / 12), abs=0.012)


def test_one_half_only_is_refused():
    speeds = _speeds(np.random.default_rng(6), {"auto": 0.0, "off": 0.0}, 0.02, 1)
    with pytest.raises(LabError, match="two blocks per cell"):
        best_arm_test(speeds, "auto", ("off",), bound=0.97)
