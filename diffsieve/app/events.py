"""What the page does: each event calls one handler and shows what it returns."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from . import views
from .controls import method_controls, model_controls, shortest_sparse, subject_controls, sweep_controls, with_values
from .errors import AppError, CancelledError, explain
from .handlers import Handlers, Spot
from .limits import Request, parse_sweep
from .page import Page
from .snippet import python_lines
from .store import Run
from .streaming import Done, stream

# All events that use a model share one place in the queue.
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
_FILES = {
    "dense": "Dense {what}",
    "sparse": "Sparse {what}",
    "side_by_side": "Side by side",
    "difference_clip": "Difference",
    "difference_map": "Difference",
    "difference": "Difference picture",
    "mask": "Block mask",
    "masks": "All block masks",
    "selections": "All chosen keys",
    "report": "Report",
}


def wire(page: Page, handlers: Handlers) -> None:
    """Attach the events of the page; programs have their own, see `api`."""
    _Events(page, handlers).attach()


class _Events:
    def __init__(self, page: Page, handlers: Handlers) -> None:
        self.page, self.handlers = page, handlers

    def attach(self) -> None:
        page, ask = self.page, self.page.ask
        private: dict[str, Any] = {"api_visibility": "private"}
        results, attention, gallery = page.results, page.attention, page.gallery
        shown = [page.status, page.run, page.cancel, page.sweep_run, page.current, page.tabs, *vars(results).values(),
                 *vars(attention).values()]  # fmt: skip
        with page.blocks:
            # Without Gradio's own checks of the values: ours name the field, and are there for programs too.
            raw: dict[str, Any] = {"preprocess": False, **private}
            started = [
                gr.on([page.run.click, ask.prompt.submit], self.on_compare, ask.list(), shown, **MODEL_QUEUE, **raw,
                      show_progress="minimal", show_progress_on=page.status, trigger_mode="once"),
                page.sweep_run.click(self.on_sweep, [*ask.list(), page.sweep_values], [*shown, page.sweep],
                                     **MODEL_QUEUE, **raw, show_progress="minimal", show_progress_on=page.status),
            ]  # fmt: skip
            page.cancel.click(self.on_cancel, None, [page.status, page.run, page.cancel, page.sweep_run], queue=False,
                              cancels=started, **private)  # fmt: skip
            page.blocks.unload(self.on_leave)
            opened = [*shown, page.sweep_values, page.followed, *ask.list()]
            page.examples.click(self.on_example, [page.examples, ask.model], opened, show_progress="hidden", **private)
            ask.model.input(self.on_load, [ask.model, page.followed],
                            [page.status, page.sweep_values, page.followed, *ask.list()],
                            show_progress_on=page.status, show_progress="minimal", **MODEL_QUEUE,
                            **private)  # fmt: skip

            own = [getattr(ask, name) for name in method_controls("ba-att", None)]
            ask.method.input(self.on_method, [ask.method, page.followed], [*own, page.sweep_values, page.followed],
                             show_progress="hidden", queue=False, **private)  # fmt: skip

            place = [page.current, attention.layer, attention.step, attention.head]
            token = [attention.frame, attention.row, attention.column]
            pictures = [attention.mask, attention.picture, attention.told]
            # One event for all of them, so that the answer for the last change comes last.
            changed = [control.input for control in (attention.layer, attention.head, attention.step, *token)]
            gr.on(changed, self.on_change_place, [*place, *token], [attention.step, *pictures], show_progress="hidden",
                  trigger_mode="always_last", **private)  # fmt: skip
            attention.picture.select(self.on_click, [*place, attention.frame], [*token, *pictures],
                                     show_progress="hidden", **private)  # fmt: skip

            listing = [gallery.pictures, gallery.ids, gallery.left, gallery.right]
            for trigger in (page.blocks.load, page.current.change):
                trigger(self.on_list_runs, [gallery.left, gallery.right], listing, show_progress="hidden", **private)
            gallery.pictures.select(self.on_open, [gallery.ids, ask.model], opened, show_progress="hidden", **private)
            gallery.keep.click(
                self.on_keep, page.current, [gallery.told, gallery.keep], show_progress="hidden", **private
            )
            gallery.keep.click(
                self.on_list_runs, [gallery.left, gallery.right], listing, show_progress="hidden", **private
            )
            page.current.change(self.on_keep_label, page.current, gallery.keep, show_progress="hidden", **private)
            gallery.both.click(self.on_pair, [gallery.left, gallery.right], [gallery.player, gallery.table],
                               show_progress="minimal", show_progress_on=gallery.player, **private)  # fmt: skip

    def on_compare(self, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        owner = owner_of(request)
        work = functools.partial(self.handlers.compare, Request(*values), owner=owner)
        started = time.monotonic()
        for message in self._stream(lambda tell: work(tell=tell), owner):
            if isinstance(message, Run):
                yield self._idle(views.done_line(message, time.monotonic() - started)) | self._show(message)
            else:
                yield message

    def on_sweep(self, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        owner = owner_of(request)

        def work(tell: Any) -> list[Run]:
            request = Request(*values[:-1])
            return self.handlers.sweep(request, parse_sweep(values[-1], request.method), owner=owner, tell=tell)

        for message in self._stream(work, owner):
            if isinstance(message, list):
                line = views.status(f"Sweep done: {len(message)} runs, all in the gallery.", "good")
                yield (
                    self._idle(line)
                    | self._show(message[-1], tab=None)
                    | {self.page.sweep: views.sweep_charts(message)}
                )
            else:
                yield message

    def _stream(self, work: Callable[[Any], Any], owner: str) -> Iterator[Any]:
        """Yield updates of the page while `work` runs, then its result; a failure ends as a line and a toast."""
        page = self.page
        yield {
            page.status: views.progress(0.0, "starting"),
            page.run: gr.update(interactive=False),
            page.sweep_run: gr.update(interactive=False),
            page.cancel: gr.update(interactive=True),
        }
        for message in stream(work, lambda: self.handlers.cancel(owner)):
            if not isinstance(message, Done):
                yield {page.status: views.progress(message.share, message.text)}
            elif message.error is None:
                yield message.result
            else:
                text = str(message.error)
                if not isinstance(message.error, CancelledError):
                    gr.Warning(views.plain(text), title="Not compared", duration=12)
                yield self._idle(views.status(f"Not done: {text}", "bad"))

    def _idle(self, line: str) -> dict[Any, Any]:
        page = self.page
        return {
            page.status: line,
            page.run: gr.update(interactive=True),
            page.sweep_run: gr.update(interactive=True),
            page.cancel: gr.update(interactive=False),
        }

    def on_cancel(self, request: gr.Request) -> tuple[Any, ...]:
        self.handlers.cancel(owner_of(request))
        line = views.status("Cancelled: the step at work ends first, nothing of the run is kept.")
        return line, gr.update(interactive=True), gr.update(interactive=False), gr.update(interactive=True)

    def on_leave(self, request: gr.Request) -> None:
        self.handlers.cancel(owner_of(request))

    def on_load(self, request: gr.Request, name: Any, followed: list[Any]) -> dict[Any, Any]:
        """Load a model and give the controls its values; those stay where the model is the one that they have."""
        if name == followed[0]:
            return {self.page.followed: followed}
        try:
            model = self.handlers.load(name, owner=owner_of(request))
        except Exception as error:
            return {self.page.status: views.status(f"Not loaded: {explain(error)}", "bad")}
        updates = self._updates(model_controls(model, self.handlers.limits))
        line = {self.page.status: views.status(f"{name} is loaded."), self.page.followed: [name, model.method]}
        return line | updates | self._sweep_field(model.method)

    def on_method(self, method: Any, followed: list[Any]) -> dict[Any, Any]:
        """Show the controls of a method, with its own block size; they stay where it is the one that they have."""
        model = followed[0]
        if method == followed[1]:
            return {self.page.followed: followed}
        controls = method_controls(method, self.handlers.shelf.loaded(model))
        return self._updates(controls) | self._sweep_field(method) | {self.page.followed: [model, method]}

    def _updates(self, controls: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
        return {getattr(self.page.ask, name): gr.update(**properties) for name, properties in controls.items()}

    def _sweep_field(self, method: Any) -> dict[Any, Any]:
        return {self.page.sweep_values: gr.update(**sweep_controls(method, self.handlers.limits.sweep))}

    def on_example(self, number: Any, chosen: Any) -> dict[Any, Any]:
        examples = [run for run in self.handlers.runs() if run.example]
        if not isinstance(number, int) or not 0 <= number < len(examples):
            raise gr.Error("this example is not there", print_exception=False)
        return self._open(examples[number], chosen)

    def on_open(self, ids: Any, chosen: Any, event: gr.SelectData) -> dict[Any, Any]:
        with told():
            run = self.handlers.store.find(ids[event.index])
        return self._open(run, chosen)

    def _open(self, run: Run, chosen: Any) -> dict[Any, Any]:
        with told():
            settings = self._settings(run, chosen)
        line = f"Shown: {views.run_title(run)}"
        if not settings:
            line += ". Its model is not offered any more, so the settings stay as they were."
        return {self.page.status: views.status(line, "good")} | self._show(run) | settings

    def _settings(self, run: Run, chosen: Any) -> dict[Any, Any]:
        """Return the updates that set the controls to what a run was made with.

        A model that is not offered any more is replaced by the one that is chosen, if that makes the same, clips or
        pictures. Otherwise nothing changes: the controls of the one kind would hide what the other needs.
        """
        settings, attention = run.report["settings"], run.report["settings"]["attention"]
        shelf, name = self.handlers.shelf, settings["model"]
        if name not in shelf.names:
            if chosen not in shelf.names or shelf.pictures(chosen) is not run.pictures:
                return {}
            name = chosen
        subject = run.clip["prompt"]
        classes = list(shelf.classes(name) or (subject,)) if run.pictures else []
        controls = subject_controls(clips=not run.pictures, classes=classes)
        controls |= method_controls(settings["method"], shelf.loaded(name))
        values = {
            "model": name,
            "negative_prompt": settings["negative_prompt"] or "",
            "seed": run.clip["seed"],
            "guidance": settings["guidance_scale"],
            "block_size": attention["block_size"],
        }
        if not run.pictures:
            values["prompt"] = subject
        elif subject in classes:
            values["class_name"] = subject
        values |= {key: settings[key] for key in ("method", "steps", "frames", "width", "height")}
        if settings["method"] == "llsa":
            values["topk"] = attention["topk"] if isinstance(attention["topk"], int) else None
        else:
            own = ("preset", "sparsity", "warmup")
            values |= {key: settings[key] for key in own if settings[key] is not None}
            given = settings["min_tokens"]
            values["min_tokens"] = shortest_sparse(name) if given is None else given
        updates = self._updates(with_values(controls, values)) | self._sweep_field(settings["method"])
        return updates | {self.page.followed: [name, settings["method"]]}

    def _show(self, run: Run, tab: str | None = "compare") -> dict[Any, Any]:
        """Return the updates that show a run."""
        page, results = self.page, self.page.results
        label, settings = views.run_label(run), run.report["settings"]
        difference = self.handlers.store.publish(run, "difference_map" if run.pictures else "difference_clip")
        end = run.clip.get("difference_scale_end")
        updates: dict[Any, Any] = {
            page.current: run.id,
            results.headline: views.headline(run),
            results.player: views.player(
                ("dense", self._published(run, "dense")),
                (label, self._published(run, "sparse")),
                fps=settings["fps"],
                frames=settings["frames"],
                title=f"{run.clip['prompt']}: dense and {label}",
                difference=(difference, end) if difference is not None and end is not None else None,
                psnr=run.clip["metrics"]["psnr"]["per_frame"],
            ),
            results.metrics: views.metrics_table([(label, run)]),
            results.curves: views.curves([(label, run)]),
            results.cost: views.cost_table([(label, run)]),
            results.facts: views.facts(run),
            results.files: self._downloads(run),
            results.code: python_lines(run.report),
            results.report: dict(run.report),
        }
        if tab is not None:
            updates[page.tabs] = gr.Tabs(selected=tab)
        return updates | self._show_attention(run)

    def _published(self, run: Run, key: str) -> Path:
        path = self.handlers.store.publish(run, key)
        if path is None:
            raise AppError(f"a {run.what} of this run is gone; run it again")
        return path

    def _downloads(self, run: Run) -> str:
        publish = self.handlers.store.publish
        found = [(label.format(what=run.what), publish(run, key)) for key, label in _FILES.items()]
        script = self.handlers.store.publish_text(run, "compare.py", python_lines(run.report))
        files = [(label, path) for label, path in found if path is not None]
        return views.downloads([*files, ("Python lines", script)])

    def _show_attention(self, run: Run) -> dict[Any, Any]:
        view = self.page.attention
        try:
            masks = self.handlers.masks(run.id)
        except AppError as error:
            empty = {component: gr.update(value=None) for component in (view.mask, view.picture)}
            none = {view.layer: gr.update(choices=[], value=None), view.step: gr.update(choices=[], value=None)}
            return {view.told: views.empty("No block mask", str(error))} | empty | none
        layers = masks.layer_names()
        layer = layers[len(layers) // 2]
        steps = masks.steps_of(layer)
        token = tuple(size // 2 for size in masks.grid_thw)
        sizes = {
            component: gr.update(maximum=max(size - 1, 1), value=value, visible=size > 1)
            for component, size, value in zip((view.frame, view.row, view.column), masks.grid_thw, token, strict=True)
        }
        mask, picture, told = self.on_look(run.id, layer, steps[-1], 0, *token)
        return {
            view.layer: gr.update(choices=[(views.layer_name(name), name) for name in layers], value=layer),
            view.head: gr.update(maximum=max(masks.heads - 1, 1), value=0, visible=masks.heads > 1),
            view.step: gr.update(choices=[(str(number + 1), number) for number in steps], value=steps[-1]),
            view.mask: mask,
            view.picture: gr.update(value=picture, elem_classes=["ds-single"] if masks.grid_thw[0] == 1 else []),
            view.told: told,
        } | sizes

    def on_look(self, run_id: Any, layer: Any, step: Any, head: Any, *token: Any) -> tuple[Any, Any, str]:
        """Return the mask, the picture and the line of one place."""
        if run_id is None or layer is None:
            return None, None, views.empty("No block mask yet", "Compare first, or take an example.")
        with told():
            mask = self.handlers.mask_view(run_id, layer, step, head)
            return mask, *self._spot(self.handlers.spot_view(run_id, layer, step, head, token), head)

    @staticmethod
    def _spot(spot: Spot, head: Any) -> tuple[Any, str]:
        return spot.picture, f'<p class="ds-spot">{views.spot_text(spot, head)}</p>'

    def on_change_place(
        self, event: gr.EventData, run_id: Any, layer: Any, step: Any, head: Any, *token: Any
    ) -> tuple[Any, ...]:
        """Show another place; another layer may have other steps."""
        if run_id is None or event.target is not self.page.attention.layer:
            return gr.skip(), *self.on_look(run_id, layer, step, head, *token)
        with told():
            steps = self.handlers.masks(run_id).steps_of(str(layer))
        step = step if step in steps else steps[-1]
        choices = gr.update(choices=[(str(number + 1), number) for number in steps], value=step)
        return choices, *self.on_look(run_id, layer, step, head, *token)

    def on_click(
        self, run_id: Any, layer: Any, step: Any, head: Any, frame: Any, event: gr.SelectData
    ) -> tuple[Any, ...]:
        with told():
            token = self.handlers.locate(run_id, frame, *event.index)
        if token is None:
            return tuple(gr.skip() for _ in range(6))
        return *token, *self.on_look(run_id, layer, step, head, *token)

    def on_list_runs(self, left: Any, right: Any) -> tuple[Any, ...]:
        runs = self.handlers.runs()
        titles = [views.run_title(run) for run in runs]
        posters = [self.handlers.store.publish(run, "poster") for run in runs]
        ids = [run.id for run in runs]
        pictures = [(str(p), title) for p, title in zip(posters, titles, strict=True) if p is not None]
        shown = [run_id for run_id, p in zip(ids, posters, strict=True) if p is not None]
        choices = list(zip(titles, ids, strict=True))
        left = left if left in ids else next(iter(ids), None)
        if right not in ids or right == left:
            right = next((run_id for run_id in ids if run_id != left), None)
        return pictures, shown, *(gr.update(choices=choices, value=value) for value in (left, right))

    def on_keep(self, run_id: Any) -> tuple[Any, Any]:
        if run_id is None:
            return views.status("Nothing is shown yet that could be kept.", "bad"), gr.skip()
        try:
            run = self.handlers.store.find(run_id)
            run = self.handlers.store.keep(run_id, not run.kept)
        except AppError as error:
            return views.status(f"Not changed: {error}", "bad"), gr.skip()
        line = "Kept until it is given free." if run.kept else "Given free: it goes after a week."
        return views.status(line, "good"), self.on_keep_label(run.id)

    def on_keep_label(self, run_id: Any) -> Any:
        run = self.handlers.store.get(run_id)
        return gr.update(value="Give the run that is shown free" if run and run.kept else "Keep the run that is shown")

    def on_pair(self, left: Any, right: Any) -> tuple[str, str]:
        with told():
            runs = self.handlers.pair(left, right)
            labels = [views.run_label(run) for run in runs]
            if labels[0] == labels[1]:
                labels = [f"{label}, seed {run.clip['seed']}" for label, run in zip(labels, runs, strict=True)]
            settings = runs[0].report["settings"]
            sides = [(label, self._published(run, "sparse")) for label, run in zip(labels, runs, strict=True)]
        player = views.player(
            sides[0], sides[1], fps=settings["fps"], frames=settings["frames"], title=" and ".join(labels)
        )
        named = list(zip(labels, runs, strict=True))
        return player, views.metrics_table(named) + views.curves(named) + views.cost_table(named)


@contextmanager
def told() -> Iterator[None]:
    """Turn what a handler raises into a toast of the page, and an error of a program's call."""
    try:
        yield
    except Exception as error:
        raise gr.Error(views.plain(str(explain(error))), print_exception=False) from error


def owner_of(request: gr.Request | None) -> str:
    """Return who asks: the session of the page or client.

    A request that names no session is an owner of its own, so that nobody can cancel for another.
    """
    return (request.session_hash if request is not None else None) or secrets.token_hex(16)
