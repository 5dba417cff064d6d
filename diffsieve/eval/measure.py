"""All metrics of a pair of clips in one walk over its frames, with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import UserInputError
from .clips import ClipReader, ClipSource, open_clip
from .flickering import FlickeringMeter
from .lpips import LoadedLpips, lpips_per_frame
from .lpips import too_small as too_small_for_lpips
from .lpips_net import NETS
from .ms_ssim import ms_ssim_per_frame, ssim_and_ms_ssim_per_frame
from .ms_ssim import too_small as too_small_for_ms_ssim
from .psnr import mse_per_frame, psnr_from_mean_mse_result, psnr_result
from .result import MetricResult
from .ssim import WINDOW_SIZE, ssim_per_frame
from .svg_compatible import box_ssim_per_frame
from .walk import walk_pair

METRICS = ("psnr", "ssim", "ms_ssim", "lpips", "svg-compatible", "temporal_flickering")
DEFAULT_METRICS = ("psnr", "ssim", "ms_ssim", "lpips")


def measure(
    reference: ClipSource,
    test: ClipSource,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    lpips: Mapping[str, LoadedLpips | str] | None = None,
    device: torch.device | str = "cpu",
    chunk_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, MetricResult]:
    """Measure how far one clip is from another.

    Args:
        reference: the dense clip; see `open_clip`. Only the frames in work are held in memory.
        test: the clip to compare, of the same number and size of frames.
        metrics: some of `METRICS`. ``"svg-compatible"`` gives three values under names of their own, which say whether
            the frames were raw; ``"temporal_flickering"`` gives one for each clip.
        lpips: by net, the loaded metric or the reason why it is not there. ``"lpips"`` gives one value for each of
            them; ``"svg-compatible"`` takes ``"vgg"``.
        device: where it is computed.
        chunk_size: frames in work at once; default: by their size. Does not change the result.
        progress: told the number of finished frames.

    Returns:
        The results by name. One without a value says why.

    Raises:
        UserInputError: unknown metrics, clips that do not fit together, or files that cannot be read.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown or not metrics:
        raise UserInputError(f"metrics must be some of {', '.join(METRICS)}, got {', '.join(unknown) or 'none'}")
    nets = dict(lpips or {})
    if any(net not in NETS for net in nets):
        raise UserInputError(f"lpips must have keys out of {', '.join(NETS)}, got {', '.join(nets)}")
    pair = open_clip(reference, _name(reference, "reference")), open_clip(test, _name(test, "test"))
    meters: list[_Meter] | None = None
    done = 0
    for x, y in walk_pair(*pair, chunk_size=chunk_size, device=torch.device(device)):
        if meters is None:
            meters = _meters(metrics, nets, _svg_label(pair), *x.shape[-2:])
        for meter in meters:
            meter.update(x, y)
        done += len(x)
        if progress is not None:
            progress(done)
    assert meters is not None
    return {result.name: result for meter in meters for result in meter.results()}


class _Meter(Protocol):
    def update(self, reference: torch.Tensor, test: torch.Tensor) -> None: ...

    def results(self) -> list[MetricResult]: ...


class _Psnr:
    """Collects the errors of frames for both means of PSNR."""

    def __init__(self) -> None:
        self._errors: list[float] = []

    def update(self, reference: torch.Tensor, test: torch.Tensor) -> None:
        self._errors += mse_per_frame(reference, test)

    def results(self) -> list[MetricResult]:
        return [psnr_result(self._errors), psnr_from_mean_mse_result(self._errors)]


class _SvgPsnr(_Psnr):
    """PSNR without the bound of 100 dB: one identical frame leaves the clip without a finite mean."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def results(self) -> list[MetricResult]:
        per_frame = psnr_result(self._errors).per_frame
        identical = self._errors.count(0.0)
        if identical:
            reason = f"infinite: {identical} identical frames, and this definition has no bound"
            return [MetricResult.missing(self._name, reason, unit="dB")]
        return [MetricResult(self._name, per_frame, math.fsum(per_frame) / len(per_frame), "dB", "higher", 0)]


@dataclass
class _PerFrame:
    """A metric that gives one value for each frame."""

    name: str
    direction: str
    values_of: Callable[[torch.Tensor, torch.Tensor], list[float]]

    def __post_init__(self) -> None:
        self._values: list[float] = []

    def update(self, reference: torch.Tensor, test: torch.Tensor) -> None:
        self._values += self.values_of(reference, test)

    def results(self) -> list[MetricResult]:
        values = tuple(self._values)
        mean = math.fsum(values) / len(values)
        return [MetricResult(self.name, values, mean, "", "lower" if self.direction == "lower" else "higher")]


class _BothSsim:
    """SSIM and MS-SSIM of a chunk at once, for the two meters that ask for one each: the finest scale is the same."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def of(self, name: str) -> Callable[[torch.Tensor, torch.Tensor], list[float]]:
        """What the meter of that name takes its values from."""

        def values_of(reference: torch.Tensor, test: torch.Tensor) -> list[float]:
            if name not in self._found:  # the first of the two; the other one takes the rest
                both = ssim_and_ms_ssim_per_frame(reference, test)
                self._found = dict(zip(("ssim", "ms_ssim"), both, strict=True))
            return self._found.pop(name)

        return values_of


@dataclass
class _Missing:
    """A metric that cannot run on these clips."""

    result: MetricResult

    def update(self, reference: torch.Tensor, test: torch.Tensor) -> None: ...

    def results(self) -> list[MetricResult]:
        return [self.result]


class _Flickering:
    def __init__(self) -> None:
        self._reference, self._test = FlickeringMeter(), FlickeringMeter()

    def update(self, reference: torch.Tensor, test: torch.Tensor) -> None:
        self._reference.update(reference)
        self._test.update(test)

    def results(self) -> list[MetricResult]:
        names = "temporal_flickering (reference)", "temporal_flickering"
        return [meter.result(name) for meter, name in zip((self._reference, self._test), names, strict=True)]


def _meters(
    metrics: Sequence[str], nets: Mapping[str, LoadedLpips | str], svg: str, height: int, width: int
) -> list[_Meter]:
    found: list[_Meter] = []
    ssim: Callable[[torch.Tensor, torch.Tensor], list[float]] = ssim_per_frame
    ms_ssim: Callable[[torch.Tensor, torch.Tensor], list[float]] = ms_ssim_per_frame
    if {"ssim", "ms_ssim"} <= set(metrics) and too_small_for_ms_ssim(height, width) is None:
        both = _BothSsim()
        ssim, ms_ssim = both.of("ssim"), both.of("ms_ssim")
    for metric in dict.fromkeys(metrics):
        if metric == "psnr":
            found.append(_Psnr())
        elif metric == "ssim":
            obstacle = f"SSIM needs at least {WINDOW_SIZE} x {WINDOW_SIZE} pixels, got {height} x {width}"
            found.append(_if(min(height, width) >= WINDOW_SIZE, "ssim", "higher", ssim, obstacle))
        elif metric == "ms_ssim":
            reason = too_small_for_ms_ssim(height, width)
            found.append(_if(reason is None, "ms_ssim", "higher", ms_ssim, reason))
        elif metric == "lpips":
            found += [_lpips(f"lpips[{net}]", net, model, height, width) for net, model in nets.items()]
        elif metric == "svg-compatible":
            found += [_SvgPsnr(f"{svg} psnr"), _PerFrame(f"{svg} ssim", "higher", box_ssim_per_frame)]
            model = nets.get("vgg", "the weights of vgg were not loaded")
            found.append(_lpips(f"{svg} lpips[vgg]", "vgg", model, height, width, rescale=False))
        else:
            found.append(_Flickering())
    return found


def _if(
    possible: bool,
    name: str,
    direction: str,
    values_of: Callable[[torch.Tensor, torch.Tensor], list[float]],
    obstacle: str | None,
) -> _Meter:
    if possible:
        return _PerFrame(name, direction, values_of)
    assert obstacle is not None
    return _Missing(MetricResult.missing(name, obstacle, direction="lower" if direction == "lower" else "higher"))


def _lpips(name: str, net: str, model: LoadedLpips | str, height: int, width: int, *, rescale: bool = True) -> _Meter:
    reason = model if isinstance(model, str) else too_small_for_lpips(net, height, width)
    if reason is not None:
        return _Missing(MetricResult.missing(name, reason, direction="lower"))
    assert isinstance(model, LoadedLpips)
    module = model.module
    return _PerFrame(name, "lower", lambda x, y: lpips_per_frame(module, x, y, rescale=rescale))


def _svg_label(pair: tuple[ClipReader, ClipReader]) -> str:
    """Their definition is of decoded video files; on anything else the name must say so."""
    from_video = all(clip.kind == "video" for clip in pair)
    return "svg-compatible" if from_video else "svg-compatible (raw frames)"


def _name(source: ClipSource, role: str) -> str | None:
    """Frames in memory are called by their role; files by their path."""
    return None if isinstance(source, (str, Path)) else role
