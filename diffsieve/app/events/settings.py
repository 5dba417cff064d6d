"""The controls of a request follow what is chosen: a model, a method, or a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from .. import views
from ..components import Followed, Page
from ..controls import method_controls, model_controls, shortest_sparse, subject_controls, sweep_controls, with_values
from ..errors import explain
from ..handlers import Handlers
from ..store import Run
from .calls import MODEL_QUEUE, PRIVATE, owner_of


class SettingsEvents:
    """The lists of models and methods.

    Args:
        page: laid out.
        handlers: load the models.
    """

    def __init__(self, page: Page, handlers: Handlers) -> None:
        self.page, self.handlers = page, handlers

    def attach(self) -> None:
        page, ask = self.page, self.page.ask
        ask.model.input(self.on_load, [ask.model, page.followed],
                        [page.status, page.sweep_values, page.followed, *ask.list()],
                        show_progress_on=page.status, show_progress="minimal", **MODEL_QUEUE,
                        **PRIVATE)  # fmt: skip
        own = [getattr(ask, name) for name in method_controls("ba-att", None)]
        ask.method.input(self.on_method, [ask.method, page.followed], [*own, page.sweep_values, page.followed],
                         show_progress="hidden", queue=False, **PRIVATE)  # fmt: skip

    def on_load(self, request: gr.Request, name: Any, followed: Followed) -> dict[Any, Any]:
        """Load a model and give the controls its values; those stay where the model is the one that they have."""
        status, state = self.page.status, self.page.followed
        if name == followed.model:
            if followed.refused is None:
                return {state: followed}
            line = views.status(f"{name} is chosen again; the settings are as they were.")
            return {status: line, state: followed._replace(refused=None)}
        try:
            model = self.handlers.load(name, owner=owner_of(request))
        except Exception as error:
            line = views.status(f"Not loaded: {explain(error)}", "bad")
            return {status: line, state: followed._replace(refused=name)}
        updates = self._updates(model_controls(model, self.handlers.limits))
        line = views.status(f"{name} is loaded.")
        return {status: line, state: Followed(name, model.method)} | updates | self._sweep_field(model.method, followed)

    def on_method(self, method: Any, followed: Followed) -> dict[Any, Any]:
        """Show the controls of a method, with its own block size; they stay where it is the one that they have."""
        if method == followed.method:
            return {self.page.followed: followed}
        controls = method_controls(method, self.handlers.shelf.loaded(followed.model))
        now = {self.page.followed: followed._replace(method=method)}
        return self._updates(controls) | self._sweep_field(method, followed) | now

    def components(self) -> list[Any]:
        """Return what `of_run` sets."""
        return [self.page.sweep_values, self.page.followed, *self.page.ask.list()]

    def of_run(self, run: Run, chosen: Any, followed: Followed) -> dict[Any, Any]:
        """Return the updates that set the controls to what a run was made with.

        A model that is not offered any more is replaced by the one that is chosen, if that makes the same, clips or
        pictures. Otherwise nothing changes: the controls of the one kind would hide what the other needs.

        Args:
            run: finished.
            chosen: model of the page's list.
            followed: whose values the controls have.
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
        updates = self._updates(with_values(controls, values)) | self._sweep_field(settings["method"], followed)
        return updates | {self.page.followed: Followed(name, settings["method"])}

    def _updates(self, controls: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
        return {getattr(self.page.ask, name): gr.update(**properties) for name, properties in controls.items()}

    def _sweep_field(self, method: Any, followed: Followed) -> dict[Any, Any]:
        """Return the field of a sweep; its values stay with the method, as some may have been typed meanwhile."""
        properties = sweep_controls(method, self.handlers.limits.sweep)
        if method == followed.method:
            del properties["value"]
        return {self.page.sweep_values: gr.update(**properties)}
