"""From which length on sparse attention pays, by device: below it, calls are dense."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Crossover:
    """The shortest sequence that runs sparse.

    Args:
        tokens: its length.
        estimate: whether it is worked out from data sheets, for a device that was not measured.
    """

    tokens: int
    estimate: bool = False


def crossover(device_type: str, capability: tuple[int, int] | None = None, gpu: str | None = None) -> Crossover:
    """Return the crossover of a device.

    Args:
        device_type: Such as "cuda".
        capability: Compute capability of a GPU of NVIDIA; None for other devices.
        gpu: Name of that GPU, as PyTorch gives it.
    """
    if device_type == "cpu":  # the kernel alone (benchmarks/results/cpu/bench/block-sparse.json)
        return Crossover(2_048)
    if device_type != "cuda":
        return Crossover(8_192, estimate=True)
    if gpu == "NVIDIA H200":
        # The whole call of the preset, half of the blocks skipped, beside cuDNN: 1.84x at 16,384 tokens as a CUDA graph
        # and 1.29x eager, beside other programs on the host; 1.23x at 8,192 as a graph, but eager the host takes longer
        # than the dense call (benchmarks/results/h200/bench/ba-att.json).
        return Crossover(16_384)
    # What is gained grows with the square of the length over the rate of dense attention, what the selection costs with
    # the length over the bandwidth of memory: the crossover goes with rate over bandwidth. By data sheets that quotient
    # is 0.4 to 1.9 times that of an H200 on GPUs before it and of consumers, and 1.4 times on data-centre Blackwell,
    # where dense attention also gains more from the architecture than the `triton` backend does.
    data_centre_blackwell = capability is not None and capability[0] == 10
    return Crossover(32_768 if data_centre_blackwell else 16_384, estimate=True)
