"""The learning rate of each step."""

import pytest

from megatron_ext.muon.config import OptimizerConfig
from pretrain.schedule import learning_rate

STEPS = 100


def rates(**options) -> list[float]:
    config = OptimizerConfig(lr=2.0, warmup_steps=10, **options)
    return [learning_rate(step, STEPS, config) for step in range(1, STEPS + 1)]


def test_warm_up_is_a_line_to_the_peak():
    assert rates()[:10] == pytest.approx([0.2 * step for step in range(1, 11)])


def test_cosine_falls_from_the_peak_to_its_final_fraction_at_the_last_step():
    found = rates(final_lr_fraction=0.1)
    assert found[9] == 2.0
    assert found[54] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way
    assert found[-1] == pytest.approx(0.2)
    assert found[9:] == sorted(found[9:], reverse=True)


def test_wsd_stays_at_the_peak_and_falls_in_a_line_over_its_last_steps():
    found = rates(schedule="wsd", decay_steps=20, final_lr_fraction=0.0)
    assert set(found[9:80]) == {2.0}
    assert found[80:] == pytest.approx([2.0 * (19 - step) / 20 for step in range(20)])


def test_constant_stays_at_the_peak():
    assert set(rates(schedule="constant")[9:]) == {2.0}


def test_without_warm_up_the_first_step_has_the_peak_or_less():
    config = OptimizerConfig(lr=2.0)
    assert learning_rate(1, STEPS, config) == pytest.approx(2.0, rel=1e-3)
