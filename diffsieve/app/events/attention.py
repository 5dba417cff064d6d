"""Where attention looked: the block mask of a layer, step and head, and what the query of one token attended to."""

from __future__ import annotations

from typing import Any

import gradio as gr

from .. import views
from ..components import Page
from ..errors import AppError
from ..handlers import Handlers
from ..store import Run
from .calls import PRIVATE, told


class AttentionEvents:
    """The choices of the tab and a click on a spot of the frames.

    Args:
        page: laid out.
        handlers: draw the pictures.
    """

    def __init__(self, page: Page, handlers: Handlers) -> None:
        self.page, self.handlers = page, handlers

    def attach(self) -> None:
        page, attention = self.page, self.page.attention
        place = [page.current, attention.layer, attention.step, attention.head]
        token = [attention.frame, attention.row, attention.column]
        pictures = [attention.mask, attention.picture, attention.told]
        # One event for all of them, so that the answer for the last change comes last.
        changed = [control.input for control in (attention.layer, attention.head, attention.step, *token)]
        gr.on(changed, self.on_change_place, [*place, *token], [attention.step, *pictures], show_progress="hidden",
              trigger_mode="always_last", **PRIVATE)  # fmt: skip
        attention.picture.select(self.on_click, [*place, attention.frame], [*token, *pictures],
                                 show_progress="hidden", **PRIVATE)  # fmt: skip

    def show(self, run: Run) -> dict[Any, Any]:
        """Return the updates that show a run: its middle layer, last step and first head, and the middle token."""
        view = self.page.attention
        try:
            masks = self.handlers.masks(run.id)
        except AppError as error:
            why = str(error)
            hidden = {box: gr.update(visible=False) for box in (view.choice, view.query)}
            empty = {view.mask: None, view.picture: gr.update(value=None, visible=False)}
            none = {view.layer: gr.update(choices=[], value=None), view.step: gr.update(choices=[], value=None)}
            told = views.empty("No block mask", f"{why[:1].upper()}{why[1:]}.")
            return {view.told: told} | hidden | empty | none
        layers = masks.layer_names()
        layer = layers[len(layers) // 2]
        steps = masks.steps_of(layer)
        token = tuple(size // 2 for size in masks.grid_thw)
        sizes = {
            component: gr.update(maximum=max(size - 1, 1), value=value, visible=size > 1)
            for component, size, value in zip((view.frame, view.row, view.column), masks.grid_thw, token, strict=True)
        }
        mask, picture, line = self._look(run.id, layer, steps[-1], 0, *token)
        return {
            view.choice: gr.update(visible=True),
            view.query: gr.update(visible=True),
            view.layer: gr.update(choices=[(views.layer_name(name), name) for name in layers], value=layer),
            view.head: gr.update(maximum=max(masks.heads - 1, 1), value=0, visible=masks.heads > 1),
            view.step: gr.update(choices=[(str(number + 1), number) for number in steps], value=steps[-1]),
            view.mask: mask,
            view.picture: gr.update(
                value=picture, visible=True, elem_classes=["ds-single"] if masks.grid_thw[0] == 1 else []
            ),
            view.told: line,
        } | sizes

    def _look(self, run_id: Any, layer: Any, step: Any, head: Any, *token: Any) -> tuple[Any, Any, str]:
        """Return the mask, the picture and the line of one place."""
        if run_id is None or layer is None:
            return None, None, views.empty("No block mask yet", "Compare first, or take an example.")
        mask = self.handlers.mask_view(run_id, layer, step, head)
        spot = self.handlers.spot_view(run_id, layer, step, head, token)
        return mask, spot.picture, f'<p class="ds-spot">{views.spot_text(spot, head)}</p>'

    def on_change_place(
        self, event: gr.EventData, run_id: Any, layer: Any, step: Any, head: Any, *token: Any
    ) -> tuple[Any, ...]:
        """Show another place; another layer may have other steps."""
        with told():
            if run_id is None or event.target is not self.page.attention.layer:
                return gr.skip(), *self._look(run_id, layer, step, head, *token)
            steps = self.handlers.masks(run_id).steps_of(str(layer))
            step = step if step in steps else steps[-1]
            choices = gr.update(choices=[(str(number + 1), number) for number in steps], value=step)
            return choices, *self._look(run_id, layer, step, head, *token)

    def on_click(
        self, run_id: Any, layer: Any, step: Any, head: Any, frame: Any, event: gr.SelectData
    ) -> tuple[Any, ...]:
        """Show the place of the token under a point of the picture."""
        with told():
            token = self.handlers.locate(run_id, frame, *event.index)
            if token is None:
                return tuple(gr.skip() for _ in range(6))
            return *token, *self._look(run_id, layer, step, head, *token)
