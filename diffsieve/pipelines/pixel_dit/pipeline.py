"""The pipeline of the pixel-space DiT: from noise to pictures by flow matching, without an autoencoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from ...errors import UserInputError
from .transformer import PixelDiTTransformer2DModel

OUTPUT_TYPES = ("pil", "np", "pt")
MAX_SIDE = 4096
NOISE_SIDE = 64


def noise_scale(height: int, width: int, noise_side: int = NOISE_SIDE) -> float:
    """Standard deviation of the noise for a picture size: its side over `noise_side`, at least 1.

    Neighbouring pixels are alike, so a large picture needs more noise: averaged down to `noise_side`, its noise level
    is that of a picture of that size (arXiv 2512.16615). The side of a picture that is not square is that of the square
    of its area.
    """
    return max(1.0, math.sqrt(height * width) / noise_side)


def _check_interval(interval: Any) -> tuple[float, float]:
    pair = tuple(interval) if isinstance(interval, Sequence) else ()
    if len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= 1:
        raise UserInputError(f"guidance_interval must be two shares of noise in [0, 1], from and to, got {interval!r}")
    return float(pair[0]), float(pair[1])


class PixelDiTPipeline(DiffusionPipeline):
    """Generates pictures with a `PixelDiTTransformer2DModel`.

    Args:
        transformer: predicts the velocity, noise minus picture.
        scheduler: a flow-matching scheduler such as `FlowMatchEulerDiscreteScheduler(shift=1)`.
        class_names: name of each class of the transformer; None to know them by number alone.
        noise_side: see `noise_scale`; as in training.
        guidance_scale: what a call uses that gives none.
        guidance_interval: the same; None for all steps.

    Raises:
        UserInputError: another number of names than the transformer has classes.
    """

    model_cpu_offload_seq = "transformer"
    _callback_tensor_inputs = ("latents",)

    def __init__(
        self,
        transformer: PixelDiTTransformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        class_names: list[str] | None = None,
        noise_side: int = NOISE_SIDE,
        guidance_scale: float = 1.0,
        guidance_interval: list[float] | None = None,
    ) -> None:
        super().__init__()
        classes = transformer.config.num_classes
        if class_names is not None and len(class_names) != classes:
            raise UserInputError(
                f"class_names must name the {classes} classes of the transformer, got {len(class_names)} names"
            )
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.register_to_config(
            class_names=class_names,
            noise_side=noise_side,
            guidance_scale=float(guidance_scale),
            guidance_interval=list(_check_interval(guidance_interval or (0.0, 1.0))),
        )

    @property
    def guidance_scale(self) -> float:
        """Of the present call."""
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        """Steps of the present call."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Set `_interrupt` in a callback to skip the steps that are left."""
        return self._interrupt

    def class_ids(self, class_labels: Sequence[int | str]) -> list[int]:
        """Numbers of classes given by number or by name; upper and lower case do not matter.

        Raises:
            UserInputError: no such class.
        """
        classes = self.transformer.config.num_classes
        if not classes:
            raise UserInputError(f"class_labels must be None for a model without classes, got {class_labels!r}")
        names = [name.casefold() for name in self.config.class_names or ()]
        found = []
        for label in class_labels:
            number = names.index(label.casefold()) if isinstance(label, str) and label.casefold() in names else label
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < classes:
                known = ", ".join(repr(name) for name in self.config.class_names or ())
                expected = f"in [0, {classes - 1}]" + (f" or one of {known}" if known else "")
                raise UserInputError(f"class_labels must be {expected}, got {label!r}")
            found.append(number)
        return found

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 20,
        guidance_scale: float | None = None,
        guidance_interval: Sequence[float] | None = None,
        num_images: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate pictures.

        Args:
            class_labels: one class for each picture, by number or name; None for pictures of no class in particular.
            height: pixels; default the transformer's `sample_size`.
            width: the same.
            num_inference_steps: denoising steps.
            guidance_scale: classifier-free guidance; 1 or less turns it off and halves the work. Default: the
                pipeline's.
            guidance_interval: shares of noise, from and to, between which guidance works. A narrower interval costs
                less and keeps more variety (Kynkäänniemi et al. 2024). Default the pipeline's.
            num_images: pictures of each class.
            generator: source of the noise, or one for each picture.
            latents: noise to start from, (B, C, height, width) with standard deviation 1, in place of `generator`.
            output_type: "pil", "np" ((B, height, width, C) in [0, 1]) or "pt" ((B, C, height, width) in [0, 1]).
            return_dict: return an `ImagePipelineOutput` instead of a tuple.
            callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step; may return
                tensors to go on with.
            callback_on_step_end_tensor_inputs: names of those tensors: "latents", the noisy pictures.

        Raises:
            UserInputError: a size, label or other argument that cannot be used.
        """
        side = self.transformer.config.sample_size
        height, width = side if height is None else height, side if width is None else width
        labels = self._labels(class_labels, num_images)
        channels = self.transformer.config.in_channels
        shape = (len(labels), channels, height, width)
        self._check(shape, num_inference_steps, generator, latents, output_type, callback_on_step_end_tensor_inputs)
        guidance_scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        interval = self.config.guidance_interval if guidance_interval is None else guidance_interval
        low, high = _check_interval(interval)
        self._guidance_scale, self._interrupt = guidance_scale, False
        device = self._execution_device
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        latents = latents.to(device, torch.float32) * noise_scale(height, width, self.config.noise_side)
        classes = self.transformer.config.num_classes
        conditions: dict[str, torch.Tensor | None] = {"cond": None}
        if classes:
            conditions["cond"] = torch.tensor(labels, device=device)
            if guidance_scale > 1 and class_labels is not None:
                conditions["uncond"] = torch.full((len(labels),), classes, device=device)

        self.scheduler.set_timesteps(num_inference_steps, device=device)
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)
        with self.progress_bar(total=self._num_timesteps) as bar:
            for i, t in enumerate(timesteps):
                if self._interrupt:
                    continue
                velocity = {}
                guided = low <= float(self.scheduler.sigmas[i]) <= high
                for name, condition in conditions.items():
                    if name == "uncond" and not guided:
                        continue
                    with self.transformer.cache_context(
                        name, step_index=i, num_inference_steps=self._num_timesteps, timestep=t
                    ):
                        velocity[name] = self.transformer(
                            latents.to(self.transformer.dtype), t.expand(len(latents)), condition, return_dict=False
                        )[0].float()
                out = velocity["cond"]
                if "uncond" in velocity:
                    out = velocity["uncond"] + guidance_scale * (out - velocity["uncond"])
                latents = self.scheduler.step(out, t, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    tensors = {name: {"latents": latents}[name] for name in callback_on_step_end_tensor_inputs}
                    latents = (callback_on_step_end(self, i, int(t), tensors) or {}).get("latents", latents)
                bar.update()
        images = self._postprocess(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, class_labels: int | str | Sequence[int | str] | None, num_images: int) -> list[int]:
        if isinstance(num_images, bool) or not isinstance(num_images, int) or num_images < 1:
            raise UserInputError(f"num_images must be a positive integer, got {num_images!r}")
        if class_labels is None:
            return [self.transformer.config.num_classes] * num_images
        given = [class_labels] if isinstance(class_labels, int | str) else list(class_labels)
        if not given:
            raise UserInputError("class_labels must name at least one class, got none")
        return [number for number in self.class_ids(given) for _ in range(num_images)]

    def _check(
        self,
        shape: tuple[int, int, int, int],
        steps: Any,
        generator: Any,
        latents: torch.Tensor | None,
        output_type: str,
        tensor_inputs: Sequence[str],
    ) -> None:
        for name, value in (("height", shape[2]), ("width", shape[3])):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
                raise UserInputError(f"{name} must be a whole number of pixels in [1, {MAX_SIDE}], got {value!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UserInputError(f"num_inference_steps must be a positive integer, got {steps!r}")
        if isinstance(generator, list) and len(generator) != shape[0]:
            raise UserInputError(f"generator must hold one for each of the {shape[0]} pictures, got {len(generator)}")
        if latents is not None and tuple(latents.shape) != shape:
            raise UserInputError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        if output_type not in OUTPUT_TYPES:
            raise UserInputError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        unknown = [name for name in tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise UserInputError(f"callback_on_step_end_tensor_inputs must be among 'latents', got {unknown[0]!r}")

    @staticmethod
    def _postprocess(latents: torch.Tensor, output_type: str) -> Any:
        images = (latents * 0.5 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        pixels: np.ndarray = images.permute(0, 2, 3, 1).cpu().numpy()
        return pixels if output_type == "np" else DiffusionPipeline.numpy_to_pil(pixels)
