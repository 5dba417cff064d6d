"""Which steps are dense at the start of a generation."""

from ..errors import UserInputError
from .clock import StepClock
from .config import BAAttConfig


def dense_steps(warmup: int | float, num_steps: int) -> int:
    """Return the dense steps that `BAAttConfig.warmup_steps` stands for: a count, or a share of `num_steps`."""
    if not isinstance(warmup, float):
        return warmup
    return max(1, int(warmup * num_steps + 0.5)) if warmup else 0


class Warmup:
    """The warm-up of a config: a number or share of steps, a noise level, or both (the stricter wins)."""

    def __init__(self, config: BAAttConfig) -> None:
        self._steps = config.warmup_steps
        self._limits = (config.warmup_until_sigma, config.warmup_until_timestep)

    def steps(self, clock: StepClock) -> int:
        """Return the dense steps that `warmup_steps` asks for in the present generation.

        Raises:
            UserInputError: it is a share, and the number of steps is unknown.
        """
        if clock.num_steps is not None:
            return dense_steps(self._steps, clock.num_steps)
        if isinstance(self._steps, float) and self._steps:
            raise UserInputError(
                f"warmup_steps={self._steps} is a share of the steps, but a transformer without its pipeline does not "
                "know how many there are: give a count such as warmup_steps=10, or write "
                "apply_sparse_attention(pipe, config) for the whole pipeline"
            )
        return int(self._steps)

    def covers(self, clock: StepClock, step: int) -> bool | None:
        """Return whether a step of the present generation is in the warm-up, None where its noise level is unknown."""
        if step < self.steps(clock):
            return True
        unknown = False
        if self._limits != (None, None):
            for level, limit in zip(clock.noise_level(step), self._limits, strict=True):
                if limit is not None and level is not None and level > limit:
                    return True
                unknown = unknown or (limit is not None and level is None)
        return None if unknown else False
