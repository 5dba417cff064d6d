"""What the page and its programming interface do, as plain functions: no Gradio here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..compare import METHODS, CompareConfig, compare
from ..compare.attention_picture import AttentionLayout, attention_picture
from ..compare.canvas import enlarge, magnification, to_image
from ..compare.files import write_json, write_png
from ..compare.folder import REPORT
from ..compare.mask_file import BlockMasks, read_masks
from ..compare.mask_picture import MASK_LEGEND, mask_picture
from ..compare.pair_files import read_shown
from ..compare.recording import blocks_text, selection_legend
from ..compare.report import environment, size_text
from ..compare.selection_file import Selections, read_selections
from .errors import AppError, public_report
from .jobs import Follow, Job, Jobs, Tell
from .limits import Limits, Request, check_model, check_request, check_sweep, check_unloaded, number, whole
from .models import LoadedModel, Shelf
from .store import POSTER, Run, Store, run_digest
from .views import layer_name

logger = logging.getLogger(__name__)

_POSTER_WIDTH = 256


@dataclass(frozen=True)
class Spot:
    """Where a query looked.

    Args:
        picture: the frames with the tokens that it attended to.
        layout: where the frames lie in the picture.
        token: (frame, row, column) of the query in the token grid.
        attended: tokens that it attended to.
        tokens: tokens in all.
        means: with LLSA, size of the means that it saw the others in, and how many tokens lie in means of each size;
            empty where it did not see them.
    """

    picture: Image.Image
    layout: AttentionLayout
    token: tuple[int, int, int]
    attended: int
    tokens: int
    means: tuple[tuple[int, int], ...] = ()


class Handlers:
    """Everything that a client can ask for.

    Args:
        shelf: the models.
        store: the finished runs, opened.
        limits: bounds of a request.
    """

    def __init__(self, shelf: Shelf, store: Store, limits: Limits) -> None:
        self.shelf, self.store, self.limits = shelf, store, limits
        self.jobs = Jobs()

    def compare(self, request: Request, *, owner: str, tell: Tell) -> Run:
        """Return the comparison that a client asks for: a finished one of the same settings, else a new one.

        Args:
            request: as the client sent it.
            owner: session of the client, which may cancel.
            tell: progress.

        Raises:
            DiffsieveError: a value is out of its range, the run was cancelled, or it failed.
        """
        self._check_before_loading(request)
        with self.jobs.run(owner) as job:
            return self._run_all([request], job, tell)[0]

    def sweep(self, request: Request, values: Any, *, owner: str, tell: Tell) -> list[Run]:
        """Return one comparison for each value, ascending; the dense clip is generated once.

        Args:
            request: the rest of the settings.
            values: shares of block pairs skipped; with LLSA numbers of top k.
            owner: session of the client.
            tell: progress.
        """
        requests = check_sweep(request, values, self.limits)
        self._check_before_loading(requests[0])  # the others differ in what is checked by now
        with self.jobs.run(owner) as job:
            return self._run_all(requests, job, tell)

    def load(self, name: Any, *, owner: str) -> LoadedModel:
        """Return a model with its defaults, loading it the first time."""
        if not isinstance(name, str):
            raise AppError("model must be a text")
        with self.jobs.run(owner):
            return self.shelf.get(name)

    def cancel(self, owner: str) -> int:
        """Cancel what a session runs or waits for; return how many jobs that were."""
        return self.jobs.cancel(owner)

    def runs(self) -> list[Run]:
        """Return the finished runs, the newest first, the examples last."""
        return self.store.runs()

    def pair(self, first: Any, second: Any) -> tuple[Run, Run]:
        """Return two runs to set against each other.

        Raises:
            AppError: one is missing, or their clips have another size.
        """
        if first is None or second is None:
            raise AppError("choose two finished runs, one on the left and one on the right")
        runs = self.store.find(first), self.store.find(second)
        sizes = [f"{run.what} of {size_text(run.report['settings'])}" for run in runs]
        if sizes[0] != sizes[1]:
            raise AppError(f"both runs must have clips or pictures of one size, got a {sizes[0]} and a {sizes[1]}")
        return runs

    def masks(self, run_id: Any) -> BlockMasks | Selections:
        """Return the block masks of a run, with LLSA the choices of keys.

        Raises:
            AppError: no such run, or one without block masks; the message says why.
        """
        run = self.store.find(run_id)
        path = run.file("masks") or run.file("selections")
        if path is None:
            if run.clip["sparsity"]["density_sparse_steps"] is None:
                raise AppError("every step of this run was dense, so there is no block mask")
            label = METHODS[run.report["settings"]["method"]].label
            raise AppError(f"this run of {label} kept no block mask: its tokens fit into one block, or it is too old")
        return _masks(str(path), path.stat().st_mtime_ns)

    def mask_view(self, run_id: Any, layer: Any, step: Any, head: Any) -> Image.Image:
        """Return the picture of the block mask of one layer, step and head."""
        masks = self.masks(run_id)
        step, head = whole("step", step, 0, 10**6), whole("head", head, 0, masks.heads - 1)
        bits = masks.mask(str(layer), step, head)
        order = masks.orders_of(str(layer), step)[head]
        legend = selection_legend(self._enriched(run_id)) if isinstance(masks, Selections) else MASK_LEGEND
        return mask_picture(
            torch.from_numpy(bits)[None],
            title=f"{layer_name(str(layer))}, step {step + 1}, head {head}",
            notes=(blocks_text(masks, bits.shape), f"numbered in {order} order"),
            first_head=head,
            legend=legend,
        )

    def _enriched(self, run_id: Any) -> bool:
        return bool(self.store.find(run_id).report["settings"]["attention"]["enrich"])

    def spot_view(self, run_id: Any, layer: Any, step: Any, head: Any, token: Sequence[Any]) -> Spot:
        """Return where the query of one token looked.

        Args:
            run_id: a run.
            layer: one of the recorded layers.
            step: one of the recorded steps, from 0.
            head: from 0.
            token: (frame, row, column) in the token grid.
        """
        masks = self.masks(run_id)
        step, head = whole("step", step, 0, 10**6), whole("head", head, 0, masks.heads - 1)
        frame, row, column = (
            whole(name, value, 0, size - 1)
            for name, value, size in zip(("frame", "row", "column"), token, masks.grid_thw, strict=True)
        )
        where = frame, row, column
        means: tuple[tuple[int, int], ...] = ()
        if isinstance(masks, Selections):
            levels, deepest, word = masks.finest(str(layer), step, head, where), len(masks.indices), "in detail"
            if self._enriched(run_id):
                sizes = range(1, deepest + 1)
                means = tuple((masks.block_size**size, int((levels == size).sum())) for size in sizes)
            else:  # no means: it is token by token or not at all
                levels, deepest = np.minimum(levels, 1), 1
        else:
            levels = (~masks.attended(str(layer), step, head, where)).astype(np.int8)
            deepest, word = 1, "attended"
        clip = self.store.find(run_id).file("sparse")
        assert clip is not None
        frames = _frames(str(clip), clip.stat().st_mtime_ns)
        layout = AttentionLayout.of(masks.grid_thw, (frames.shape[-2], frames.shape[-1]), frame)
        picture = attention_picture(frames, levels, deepest, where, layout, word)
        return Spot(picture, layout, where, int((levels == 0).sum()), levels.size, means)

    def locate(self, run_id: Any, frame: Any, x: Any, y: Any) -> tuple[int, int, int] | None:
        """Return the token under a point of the picture of `spot_view`, or `None` beside its frames.

        Args:
            run_id: a run.
            frame: of the query that the picture shows.
            x: pixels from the left.
            y: pixels from the top.
        """
        grid = self.masks(run_id).grid_thw
        settings = self.store.find(run_id).report["settings"]
        frame = whole("frame", frame, 0, grid[0] - 1)
        x, y = (number(name, value, 0, 10**5) for name, value in (("x", x), ("y", y)))
        return AttentionLayout.of(grid, (settings["height"], settings["width"]), frame).locate(x, y)

    def _check_before_loading(self, request: Request) -> None:
        """Refuse wrong values before the request waits for its turn and for the weights."""
        name = check_model(request.model, self.shelf.names)
        pictures, classes = self.shelf.pictures(name), self.shelf.classes(name)
        if pictures is None or (pictures and classes is None):
            check_unloaded(request, self.limits)
        else:
            check_request(request, self.limits, classes)

    def _run_all(self, requests: Sequence[Request], job: Job, tell: Tell) -> list[Run]:
        model = self.shelf.get(requests[0].model)
        # All are checked before the first one runs.
        configs = [check_request(request, self.limits, model.classes) for request in requests]
        what = "clip" if model.classes is None else "picture"
        return [
            self._run(config, model, Follow(job, tell, place, len(configs), what=what))
            for place, config in enumerate(configs)
        ]

    def _run(self, config: CompareConfig, model: LoadedModel, follow: Follow) -> Run:
        config = config.filled(model.defaults)
        run_id = self._digest(config, model)
        earlier = self.store.get(run_id)
        if earlier is not None:
            return earlier
        self.store.clean()
        with self.store.new_run(run_id) as work:
            report = compare(
                dataclasses.replace(config, out=work),
                pipe=model.pipe,
                progress=follow,
                dense_clips=self.store.dense_clips,
            )
            write_poster(work, report["clips"][0])
            write_json(work / REPORT, public_report(report))
        return self.store.find(run_id)

    @staticmethod
    def _digest(config: CompareConfig, model: LoadedModel) -> str:
        place = environment(model.pipe)
        settings = config.settings() | {
            "prompt": list(config.prompt),
            "seed": list(config.seed),
            "weights": model.weights,
            "environment": {key: place[key] for key in ("versions", "device_name", "dtype", "vae_dtype")},
        }
        return run_digest(settings)


def write_poster(folder: Path, clip: Any) -> None:
    """Write the middle frame of the sparse clip as a small picture for the gallery."""
    frames = read_shown(folder / clip["folder"] / clip["files"]["sparse"])
    frame = to_image(frames[len(frames) // 2])
    image = enlarge(frame, magnification(frame.width, _POSTER_WIDTH)) if frame.width < _POSTER_WIDTH else frame
    image.thumbnail((_POSTER_WIDTH, _POSTER_WIDTH))
    write_png(folder / POSTER, image)


@lru_cache(maxsize=2)
def _masks(path: str, changed: int) -> BlockMasks | Selections:
    file = Path(path)
    return read_selections(file) if file.name.startswith("selections") else read_masks(file)


@lru_cache(maxsize=2)
def _frames(path: str, changed: int) -> torch.Tensor:
    """Return the frames of a video file, or a picture as the only one: (T, 3, H, W) uint8."""
    return read_shown(Path(path))
