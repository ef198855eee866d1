from __future__ import annotations

import random

import pytest

from baton.actors.engine.batch import Batch, Row
from baton.actors.step_cost import StepCost, StepCostFit, StepShape
from baton.actors.step_meter import MIN_STEPS, PrefillShare, StepMeter

CPU = StepCost(
    constant_ms=40.0, prefill_token_ms=3.0, prefill_context_ms=1e-4, decode_ms=2.0, decode_token_ms=1e-3
)  # a thousand times slower than the prior


def shapes(num: int, *, seed: int = 1) -> list[StepShape]:
    chance = random.Random(seed)
    made: list[StepShape] = []
    for _ in range(num):
        tokens = chance.choice([0, 0, chance.randrange(1, 2048)])
        decodes = chance.randrange(64)
        context = tokens * (chance.randrange(8000) + tokens / 2)
        made.append(StepShape(tokens, context, decodes, decodes * chance.randrange(100, 3000)))
    return made


def error(fit: StepCostFit, true: StepCost) -> float:
    """The worst relative error over other steps than those that were learnt from."""
    return max(abs(fit.cost.step_ms(shape) / true.step_ms(shape) - 1) for shape in shapes(200, seed=2))


def test_a_step_s_shape_is_told_from_its_rows() -> None:
    decode = Row(0, 100, 1, (5,), (), True)
    chunk = Row(1, 64, 32, tuple(range(32)), (), False)
    assert StepShape.of((decode, decode, chunk)) == StepShape(32, 32 * 80.0, 2, 200)


def test_the_fit_finds_costs_far_from_the_prior_in_noise() -> None:
    chance = random.Random(3)
    fit = StepCostFit()
    for shape in shapes(300):
        fit.add(shape, CPU.step_ms(shape) * chance.uniform(0.95, 1.05))
    assert error(fit, CPU) < 0.03


def test_the_fit_follows_a_worker_that_becomes_slower() -> None:
    fit = StepCostFit(memory_steps=200)
    for shape in shapes(500):
        fit.add(shape, StepCost().step_ms(shape))
    for shape in shapes(1000):
        fit.add(shape, 2 * StepCost().step_ms(shape))
    assert (
        abs(fit.cost.step_ms(StepShape(1000, 5e5, 8, 8000)) / StepCost().step_ms(StepShape(1000, 5e5, 8, 8000)) - 2)
        < 0.1
    )


def test_hours_of_decoding_do_not_forget_what_prefill_costs() -> None:
    fit = StepCostFit(memory_steps=100)
    for shape in shapes(300):
        fit.add(shape, CPU.step_ms(shape))
    for _ in range(60_000):
        shape = StepShape(0, 0.0, 4, 4000)
        fit.add(shape, CPU.step_ms(shape))
    assert fit.cost.prefill_token_ms == pytest.approx(CPU.prefill_token_ms, rel=0.05)


def test_one_step_that_hung_changes_little() -> None:
    fit = StepCostFit()
    for shape in shapes(300):
        fit.add(shape, CPU.step_ms(shape))
    fit.add(shapes(1)[0], 60_000.0)
    assert error(fit, CPU) < 0.03


def test_no_cost_is_ever_negative() -> None:
    chance = random.Random(4)
    fit = StepCostFit()
    for shape in shapes(500):
        fit.add(shape, chance.uniform(1, 1000))
        assert min(fit.cost.step_ms(StepShape()), fit.cost.prefill_token_ms, fit.cost.decode_ms) >= 0


def batch(tokens: int) -> Batch:
    return Batch((Row(0, 0, tokens, (), (), True),))


def test_overlapping_steps_are_timed_from_the_end_of_the_one_before() -> None:
    """Each takes 10 ms + 1 ms a token; the next is launched long before the one before has ended."""
    meter = StepMeter()
    sizes = [2 + i % 7 * 50 for i in range(200)]
    end = 0.0
    for i, size in enumerate(sizes):
        meter.launched(batch(size), max(end - 0.009, 0.0))
        if i:
            end += (10 + sizes[i - 1]) / 1e3
            meter.ended(1, end)
    assert meter.cost is not None
    assert meter.cost.step_ms(StepShape(100, 100 * 50.0)) == pytest.approx(110, rel=0.02)


def test_a_step_after_a_pause_is_timed_from_its_launch() -> None:
    meter = StepMeter()
    for i in range(2 * MIN_STEPS):
        assert (meter.cost is None) == (i < MIN_STEPS)
        meter.launched(batch(1), float(i))
        meter.ended(0, i + 0.02)
    assert meter.cost is not None
    assert meter.cost.step_ms(StepShape(num_decodes=1)) == pytest.approx(20, rel=0.02)


def test_the_share_of_prefill_is_that_of_the_last_seconds() -> None:
    share = PrefillShare()
    for i in range(1000):
        share.add(prefill_ms=30.0, now=i / 10)
    assert share.at(99.9) == pytest.approx(0.3, rel=0.05)
    assert share.at(130.0) < 0.01
