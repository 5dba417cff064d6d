"""Run a pipeline dense and sparse from the same noise, measure the distance, and write what there is to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserInputError
from ..eval import LoadedLpips, MetricResult, lpips, ms_ssim, psnr, psnr_from_mean_mse, ssim
from ..pipelines.defaults import makes_pictures
from ..pipelines.loading import weights_digest
from . import folder as folders
from .clip import Clip, generate_clip
from .clip_file import DenseClips, read_clip, write_clip
from .compare_page import comparison_page, load_lpips_or_say_why
from .config import AUTO, CompareConfig
from .files import remove_parts, write_frames, write_json
from .floor import other_kernel
from .methods import METHODS, method_label
from .page import write_page
from .pair_files import FILES, PICTURE_FILES, write_pair, write_shown
from .prepare import Prepared, prepare, resolve_place
from .progress import ItemProgress, ProgressCallback
from .recording import collector_of, last_mask_picture, mask_layer, record_layers
from .report import COMPARE_SCHEMA, clip_seconds, environment, floor_summary, now, speed_up, summary
from .video import to_uint8


def compare(
    config: CompareConfig,
    *,
    pipe: Any | None = None,
    attention: Any | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    command: Sequence[str] | None = None,
    dense_clips: Path | None = None,
) -> dict[str, Any]:
    """Generate every prompt and seed twice from the same noise, dense and sparse, and compare the raw frames.

    Per prompt and seed a folder with both clips, side_by_side.mp4, difference.png, difference.mp4, mask.png and
    metrics.json; beside them settings.json at the start, report.html and report.json at the end. A `PixelDiTPipeline`
    makes pictures: the same as .png files, with difference_map.png in the place of difference.mp4; dense is then full
    attention with the weights as they are. A file is complete or absent at any time. A pair whose metrics.json stands
    is not made again by a resumed run, and a finished dense half is not either.

    Args:
        config: what to generate; see `CompareConfig`.
        pipe: a loaded text-to-video pipeline or `PixelDiTPipeline`; default: load `config.model`.
        attention: configuration of the sparse attention, for options that `config` has not; default: from `config`.
        resume: continue the run in `config.out`; its settings must be the same, prompts and seeds may be added.
        overwrite: replace the comparison in `config.out`.
        progress: told after every step.
        command: the words of the command line, for the report.
        dense_clips: folder that keeps the raw dense clips for later comparisons which differ in the sparse attention
            alone; one that is there is not generated again, and its times are those of the run that made it.

    Returns:
        What report.json holds.

    Raises:
        UserInputError: an argument is wrong, the folder cannot be used, or the settings differ from the run to resume.
        BackendUnavailableError: the named backend cannot run here.
        DiffsieveError: a clip holds NaN, or ffmpeg failed.
    """
    from ..processors import full_attention

    config = resolve_place(config, pipe)
    earlier = folders.check_output(config.out, resume=resume, overwrite=overwrite)
    if resume and earlier is not None:
        given = {name: value for name, value in config.settings().items() if value is not None}
        if config.method == AUTO:  # the model decides, which is not loaded yet
            del given["method"]
        folders.check_same_settings(earlier, given, config.out)
    ready = prepare(config, pipe=pipe, attention=attention, pictures=True)
    config, layer = ready.config, mask_layer(ready)
    if layer is not None:
        ready = record_layers(ready, layer)
    place = environment(ready.pipe)
    settings = config.settings() | {
        "mask_layer": layer,
        "attention": ready.attention.to_dict(),
        "weights": weights_digest(ready.pipe),
        "environment": {key: place[key] for key in ("versions", "device_name", "vae_dtype")},
    }
    if earlier is not None and resume:
        folders.check_same_settings(earlier, settings, config.out)
        folders.check_same_clips(earlier, config.prompt, config.seed, config.out)
    folders.make_output(config.out)
    with folders.exclusive(config.out):
        if folders.check_output(config.out, resume=resume, overwrite=overwrite) != earlier:
            raise UserInputError(f"out must not be in use by another run, got {config.out}, which one has just written")
        if earlier is not None and not resume:
            folders.clear(config.out, earlier, [*FILES.values(), *PICTURE_FILES.values(), folders.RECORD])
        folders.start(config.out, settings, config.prompt, config.seed)
        with full_attention(ready.pipe):
            shared = None if dense_clips is None else DenseClips(dense_clips)
            records = _make_pairs(ready, settings, progress, shared, layer)
        report = {
            "schema": COMPARE_SCHEMA,
            "created": now(),
            "command": None if command is None else list(command),
            "settings": settings,
            "prompt": list(config.prompt),
            "seed": list(config.seed),
            "pictures": makes_pictures(ready.pipe),
            "environment": place,
            "notes": sorted({note for record in records for note in record["notes"]}),
            "summary": summary(records),
            "floor": floor_summary(records),
            "clips": records,
        }
        page = comparison_page(report, config.out, method_label(config.method, ready.attention))
        write_page(config.out / folders.PAGE, page)
        write_json(config.out / folders.REPORT, report)
    return report


def _make_pairs(
    ready: Prepared[CompareConfig],
    settings: Mapping[str, Any],
    progress: ProgressCallback | None,
    shared: DenseClips | None,
    layer: int | None,
) -> list[dict[str, Any]]:
    """Make every pair that is not there yet; return the records of all."""
    config = ready.config
    pairs = [(index, prompt, seed) for index, prompt in enumerate(config.prompt) for seed in config.seed]
    perceptual = load_lpips_or_say_why(ready.pipe._execution_device)
    records: list[dict[str, Any]] = []
    for number, (index, prompt, seed) in enumerate(pairs):
        folder = config.out / folders.item_name(index, prompt, seed)
        teller = ItemProgress(progress, number, len(pairs), prompt, seed, config.steps or 0)
        record = folders.read_record(folder)
        if record is None:
            folder.mkdir(exist_ok=True)
            remove_parts(folder)
            dense = _dense_clip(ready, settings, prompt, seed, folder / FILES["dense_frames"], teller, shared)
            record = _make_pair(ready, prompt, seed, folder, teller, perceptual, dense, layer)
        records.append(record)
        teller.tell("sparse", "done", config.steps or 0)
    return records


def _dense_clip(
    ready: Prepared[CompareConfig],
    settings: Mapping[str, Any],
    prompt: str,
    seed: int,
    checkpoint: Path,
    teller: ItemProgress,
    shared: DenseClips | None,
) -> Clip:
    """Return the dense clip: of an interrupted run, of an earlier comparison, or generated now."""
    dense = read_clip(checkpoint)
    if dense is not None:
        return dense
    if shared is not None:
        dense = shared.get(settings, prompt, seed)
    if dense is None:
        on_step = teller.step_callback("dense")
        dense = generate_clip(ready.pipe, ready.config, prompt=prompt, seed=seed, name="dense", on_step=on_step)
        if shared is not None:
            shared.put(settings, prompt, seed, dense)
    if shared is None or ready.config.save_frames:
        write_clip(checkpoint, dense)
    return dense


def _make_pair(
    ready: Prepared[CompareConfig],
    prompt: str,
    seed: int,
    folder: Path,
    teller: ItemProgress,
    perceptual: LoadedLpips | MetricResult,
    dense: Clip,
    layer: int | None,
) -> dict[str, Any]:
    from ..processors import apply_sparse_attention, remove_sparse_attention

    config, pipe = ready.config, ready.pipe
    files = PICTURE_FILES if makes_pictures(pipe) else FILES
    paths = {name: folder / file for name, file in files.items()}
    apply_sparse_attention(pipe, ready.attention)
    try:
        tell = teller.step_callback("sparse")
        collector = collector_of(ready)

        def on_step(step: int) -> None:
            if config.save_masks and layer is not None:
                collector.after_step(step)
            tell(step)

        sparse = generate_clip(pipe, config, prompt=prompt, seed=seed, name="sparse", on_step=on_step)
        sparsity = METHODS[config.method].measured(pipe, config.steps or 0)
        ran_sparse = sparsity["density_sparse_steps"] is not None
        mask = None
        if ran_sparse and layer is not None:
            label = method_label(config.method, ready.attention)
            mask = last_mask_picture(ready, layer, f"{prompt} · seed {seed}", label)
    finally:
        remove_sparse_attention(pipe)

    teller.tell("sparse", "write", config.steps or 0)
    metrics = _metrics(dense, sparse, perceptual)
    floor, floor_files = _make_floor(ready, prompt, seed, paths, teller, perceptual, dense)
    item = {"prompt": prompt, "seed": seed}
    written, scale_end = write_pair(ready, item, paths, (dense, sparse), metrics, mask, collector.result())
    seconds = {"dense": clip_seconds(dense), "sparse": clip_seconds(sparse)}
    record = {
        **item,
        "folder": folder.name,
        "files": {name: paths[name].name for name in [*written, *floor_files]},
        "metrics": {metric.name: metric.to_dict() for metric in metrics},
        "floor": floor,
        "difference_scale_end": scale_end,
        "sparsity": sparsity,
        "seconds": seconds,
        "speed_up": speed_up(seconds["dense"], seconds["sparse"], sparsity["steps_dense"]),
        "notes": _notes(sparsity, "pictures" if makes_pictures(pipe) else "clips"),
    }
    write_json(folder / folders.RECORD, record)
    if not config.save_frames:
        paths["dense_frames"].unlink(missing_ok=True)
    return record


def _metrics(dense: Clip, other: Clip, perceptual: LoadedLpips | MetricResult) -> list[MetricResult]:
    found = [metric(dense.frames, other.frames) for metric in (psnr, psnr_from_mean_mse, ssim, ms_ssim)]
    if isinstance(perceptual, LoadedLpips):
        return [*found, lpips(dense.frames, other.frames, model=perceptual)]
    return [*found, perceptual]


def _make_floor(
    ready: Prepared[CompareConfig],
    prompt: str,
    seed: int,
    paths: dict[str, Path],
    teller: ItemProgress,
    perceptual: LoadedLpips | MetricResult,
    dense: Clip,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Make the dense clip with another kernel, if asked for; return its record and the keys of its files."""
    config = ready.config
    if not config.floor:
        return None, []
    with other_kernel(ready.pipe) as kernel:
        on_step = teller.step_callback("floor")
        clip = generate_clip(ready.pipe, config, prompt=prompt, seed=seed, name="noise floor", on_step=on_step)
    write_shown(paths["floor"], to_uint8(clip.frames), config.fps)
    if config.save_frames:
        write_frames(paths["floor_frames"], clip.frames)
    metrics = {metric.name: metric.to_dict() for metric in _metrics(dense, clip, perceptual)}
    return {"kernel": kernel, "metrics": metrics}, ["floor", *(["floor_frames"] if config.save_frames else [])]


def _notes(sparsity: dict[str, Any], what: str) -> list[str]:
    """Say what a reader of the numbers must know; a comparison without any sparse step above all."""
    if sparsity["density_sparse_steps"] is None:
        reasons = ", ".join(sparsity["dense_reasons"])
        return [f"all {sparsity['steps_total']} steps ran dense ({reasons}): both {what} are the same computation"]
    return list(sparsity["notes"])
