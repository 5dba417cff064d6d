"""From which length on sparse attention pays, by device: below it, calls are dense."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Crossover:
    """The shortest sequence that runs sparse.

    Args:
        tokens: its length.
        measured: whether it comes from measurements on such a device; else it is an estimate.
    """

    tokens: int
    measured: bool


# CPU: the kernel alone (benchmarks/results/cpu/bench/block-sparse.json). H200: the whole call of the preset, compiled,
# half of the blocks skipped, beside cuDNN: 0.64x at 8,192 tokens, 1.07x at 16,384 (results/h200/bench/ba-att.json), by
# the backend `triton` and with scores of moments: not measured again since.
CPU = Crossover(2_048, measured=True)
BY_CAPABILITY = {(9, 0): Crossover(16_384, measured=True)}
# What is gained grows with the square of the length over the rate of dense attention, what the selection costs with the
# length over the bandwidth of memory: the crossover goes with rate over bandwidth. By data sheets that quotient is 0.4
# to 1.9 times that of an H200 on GPUs before it and of consumers, and 1.4 times on data-centre Blackwell, where dense
# attention also gains more from the architecture than the `triton` backend does.
GPU = Crossover(16_384, measured=False)
BY_MAJOR = {10: Crossover(32_768, measured=False)}
ELSEWHERE = Crossover(8_192, measured=False)


def crossover(device_type: str, capability: tuple[int, int] | None = None) -> Crossover:
    """Return the crossover of a device.

    Args:
        device_type: Such as "cuda".
        capability: Compute capability of a GPU of NVIDIA; None for other devices.
    """
    if device_type == "cpu":
        return CPU
    if device_type != "cuda":
        return ELSEWHERE
    if capability is None:
        return GPU
    return BY_CAPABILITY.get(capability) or BY_MAJOR.get(capability[0], GPU)
