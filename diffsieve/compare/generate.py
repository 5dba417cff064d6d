"""Generate clips, dense or with sparse attention, into mp4 files and a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UserInputError
from ..pipelines.defaults import makes_pictures
from ..pipelines.loading import load_pipeline
from .clip import generate_clip
from .config import DENSE, GenerateConfig
from .files import remove_parts, write_json
from .folder import REPORT, check_writable, item_name, make_output
from .generate_images import generate_images
from .methods import METHODS
from .prepare import prepare, resolve_place
from .progress import ItemProgress, ProgressCallback
from .report import GENERATE_SCHEMA, clip_seconds, environment, now
from .video import to_uint8, write_mp4


def generate(
    config: GenerateConfig,
    *,
    pipe: Any | None = None,
    attention: Any | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Generate one clip for every prompt and seed, `NNN-<prompt>-seed<seed>.mp4`, and report.json at the end.

    A `PixelDiTPipeline` makes pictures instead; see `generate_images`.

    Args:
        config: what to generate; see `GenerateConfig`.
        pipe: a loaded text-to-video pipeline or `PixelDiTPipeline`; default: load `config.model`.
        attention: configuration of the sparse attention, for options that `config` has not; default: from `config`.
        overwrite: replace files of the same name.
        progress: told after every step.
        command: the words of the command line, for the report.

    Returns:
        What report.json holds.

    Raises:
        UserInputError: an argument is wrong, the folder cannot be used, or holds files of the same name.
        BackendUnavailableError: the named backend cannot run here.
        DiffsieveError: a clip holds NaN, or ffmpeg failed.
    """
    from ..processors import apply_sparse_attention, remove_sparse_attention

    config = resolve_place(config, pipe)
    check_writable(config.out)
    if config.prompt:  # else the model's default decides, known after loading
        _check_free(config, overwrite)
    if pipe is None:
        pipe = load_pipeline(config.model, device=config.device, dtype=config.dtype)
    if makes_pictures(pipe):
        if attention is not None:
            raise UserInputError(f"attention must be left out for a model of pictures, got {attention!r}")
        return generate_images(config, pipe, overwrite=overwrite, progress=progress, command=command)
    ready = prepare(config, pipe=pipe, attention=attention)
    config, pipe = ready.config, ready.pipe
    _check_free(config, overwrite)
    assert config.steps is not None
    assert config.fps is not None

    make_output(config.out)
    remove_parts(config.out)
    items = [(index, prompt, seed) for index, prompt in enumerate(config.prompt) for seed in config.seed]
    run = DENSE if config.method == DENSE else "sparse"
    records = []
    if run != DENSE:
        apply_sparse_attention(pipe, ready.attention)
    try:
        for number, (index, prompt, seed) in enumerate(items):
            teller = ItemProgress(progress, number, len(items), prompt, seed, config.steps)
            clip = generate_clip(pipe, config, prompt=prompt, seed=seed, on_step=teller.step_callback(run))
            teller.tell(run, "write", config.steps)
            target = config.out / f"{item_name(index, prompt, seed)}.mp4"
            write_mp4(target, to_uint8(clip.frames), fps=config.fps)
            records.append(
                {
                    "prompt": prompt,
                    "seed": seed,
                    "file": target.name,
                    "seconds": clip_seconds(clip),
                    "sparsity": None if run == DENSE else METHODS[config.method].measured(pipe, config.steps),
                }
            )
            teller.tell(run, "done", config.steps)
    finally:
        if run != DENSE:
            remove_sparse_attention(pipe)
    report = {
        "schema": GENERATE_SCHEMA,
        "created": now(),
        "command": None if command is None else list(command),
        "settings": config.settings() | {"attention": None if run == DENSE else ready.attention.to_dict()},
        "prompt": list(config.prompt),
        "seed": list(config.seed),
        "environment": environment(pipe),
        "clips": records,
    }
    write_json(config.out / REPORT, report)
    return report


def _check_free(config: GenerateConfig, overwrite: bool) -> None:
    names = [f"{item_name(i, prompt, seed)}.mp4" for i, prompt in enumerate(config.prompt) for seed in config.seed]
    taken = [name for name in [*names, REPORT] if (config.out / name).exists()]
    if taken and not overwrite:
        raise UserInputError(f"out must not hold {taken[0]} already, got {config.out}; overwrite replaces it")
