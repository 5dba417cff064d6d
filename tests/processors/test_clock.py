"""StepClock on real schedulers and cache contexts, without a model."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.hooks.hooks import CacheContext

from diffsieve import BAAttConfig, UserInputError
from diffsieve.processors.clock import StepClock
from diffsieve.processors.warmup import Warmup

SCHEDULERS = {
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


class _Pipeline(SimpleNamespace):
    """Holds a scheduler, as a pipeline does; hashable and weakly referable."""


def _run(clock, scheduler, steps, *, branches=2, skip=0, contexts=False, stop_before_step=None):
    """Drive a clock through a denoising loop; returns the steps that it saw, one per transformer call."""
    scheduler.set_timesteps(steps)
    seen = []
    sample = torch.zeros(1, 4)
    for i, t in enumerate(scheduler.timesteps[skip:]):
        for branch in ("cond", "uncond")[:branches]:
            told = {"step_index": i, "num_inference_steps": steps} if contexts else {}
            clock.tick("transformer", CacheContext(branch, **told), t.expand(1))
            seen.append(clock.step)
        if stop_before_step == i:
            return seen
        sample = scheduler.step(torch.zeros_like(sample), t, sample).prev_sample
    return seen


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("contexts", [True, False], ids=["context", "scheduler"])
def test_counts_steps_not_calls(kind, contexts):
    pipe = _Pipeline(scheduler=SCHEDULERS[kind]())
    clock = StepClock(pipe)
    assert _run(clock, pipe.scheduler, 4, contexts=contexts) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (clock.generation, clock.num_steps) == (1, 4)
    assert clock.source == ("context" if contexts else "scheduler")
    assert _run(clock, pipe.scheduler, 3, branches=1, contexts=contexts) == [0, 1, 2]
    assert (clock.generation, clock.num_steps) == (2, 3)


@pytest.mark.parametrize("contexts", [True, False], ids=["context", "scheduler"])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_starts_again_after_an_abort(contexts, stop):
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    clock = StepClock(pipe)
    _run(clock, pipe.scheduler, 4, contexts=contexts, stop_before_step=stop)
    assert _run(clock, pipe.scheduler, 4, contexts=contexts)[:4] == [0, 0, 1, 1]
    assert clock.generation == 2


@pytest.mark.parametrize("contexts", [True, False], ids=["context", "scheduler"])
def test_single_step_generations_are_told_apart(contexts):
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    clock = StepClock(pipe)
    for generation in (1, 2, 3):
        assert _run(clock, pipe.scheduler, 1, contexts=contexts) == [0, 0]
        assert clock.generation == generation


def test_follows_a_replaced_scheduler():
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    clock = StepClock(pipe)
    _run(clock, pipe.scheduler, 4)
    pipe.scheduler = SCHEDULERS["unipc"]()
    assert _run(clock, pipe.scheduler, 3) == [0, 0, 1, 1, 2, 2]
    assert (clock.generation, clock.num_steps) == (2, 3)


@pytest.mark.parametrize("known", [True, False], ids=["num_timesteps", "unknown"])
def test_image_to_image_starts_at_zero(known):
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    if known:
        pipe.num_timesteps = 6
    clock = StepClock(pipe)
    assert _run(clock, pipe.scheduler, 10, branches=1, skip=4) == [0, 1, 2, 3, 4, 5]
    assert clock.num_steps == 6  # where the pipeline does not tell, from the second step on
    assert clock.noise_level(2) == (pipe.scheduler.sigmas[6].item(), pipe.scheduler.timesteps[6].item())


def test_skipped_transformer_calls_do_not_stop_the_clock():
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"](), num_timesteps=5)
    clock = StepClock(pipe)
    pipe.scheduler.set_timesteps(5)
    seen, sample = [], torch.zeros(1, 4)
    for i, t in enumerate(pipe.scheduler.timesteps):
        if i not in (1, 2):
            clock.tick("transformer", None, t)
            seen.append(clock.step)
        sample = pipe.scheduler.step(sample, t, sample).prev_sample
    assert seen == [0, 3, 4]


def test_two_transformers_share_the_step():
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    clock = StepClock(pipe)
    pipe.scheduler.set_timesteps(4)
    seen, sample = [], torch.zeros(1, 4)
    for i, t in enumerate(pipe.scheduler.timesteps):
        clock.tick("transformer" if i < 2 else "transformer_2", None, t)
        seen.append(clock.step)
        sample = pipe.scheduler.step(sample, t, sample).prev_sample
    assert seen == [0, 1, 2, 3]
    assert clock.generation == 1


def test_without_a_pipeline_timesteps_are_counted():
    clock = StepClock()
    seen = []
    for value in (1000, 1000, 750, 750, 500, 1000, 900):
        clock.tick("transformer", None, torch.tensor([value]))
        seen.append((clock.generation, clock.step))
    assert seen == [(1, 0), (1, 0), (1, 1), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert (clock.source, clock.num_steps) == ("timestep", None)
    assert clock.noise_level(clock.step) == (None, 900.0)
    assert clock.noise_level(clock.step + 1) == (None, None)


def test_per_token_timesteps_count_by_their_largest():
    clock = StepClock()
    for value, step in ((1000.0, 0), (800.0, 1), (800.0, 1)):
        clock.tick("transformer", None, torch.tensor([[0.0, value, value]]))  # first frame clean
        assert clock.step == step


def test_a_lost_pipeline_is_no_error():
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    clock = StepClock(pipe)
    _run(clock, pipe.scheduler, 2)
    del pipe
    clock.tick("transformer", None, torch.tensor(1000.0))
    assert (clock.source, clock.step) == ("timestep", 0)


def _clock_at_start(steps=10):
    pipe = _Pipeline(scheduler=SCHEDULERS["euler"]())
    pipe.scheduler.set_timesteps(steps)
    clock = StepClock(pipe)
    clock.tick("transformer", None, pipe.scheduler.timesteps[0])
    return pipe, clock


@pytest.mark.parametrize(
    ("warmup_steps", "steps", "expected"),
    [(0.2, 10, 2), (0.2, 12, 2), (0.2, 14, 3), (0.2, 50, 10), (0.2, 2, 1), (0.0, 10, 0), (1.0, 10, 10), (1, 10, 1)],
)
def test_warmup_share_and_count(warmup_steps, steps, expected):
    pipe, clock = _clock_at_start(steps)
    warmup = Warmup(BAAttConfig(warmup_steps=warmup_steps))
    assert [warmup.covers(clock, i) for i in range(steps)].count(True) == expected
    assert pipe.scheduler is not None


@pytest.mark.parametrize("field", ["warmup_until_sigma", "warmup_until_timestep"])
def test_the_stricter_warmup_wins(field):
    pipe, clock = _clock_at_start()
    scale = 1 if field == "warmup_until_sigma" else 1000
    sigmas = pipe.scheduler.sigmas.tolist()
    limit = {field: (sigmas[3] + sigmas[4]) / 2 * scale}  # dense in steps 0 to 3
    for count, expected in ((2, 4), (6, 6)):
        warmup = Warmup(BAAttConfig(warmup_steps=count, **limit))
        assert [warmup.covers(clock, i) for i in range(10)] == [True] * expected + [False] * (10 - expected)


def test_a_share_without_a_number_of_steps_is_an_error():
    clock = StepClock()
    clock.tick("transformer", None, torch.tensor(1000.0))
    with pytest.raises(UserInputError, match=r"warmup_steps=0\.2 is a share .* apply_sparse_attention\(pipe"):
        Warmup(BAAttConfig()).steps(clock)
    assert Warmup(BAAttConfig(warmup_steps=0.0)).steps(clock) == 0
