"""The endpoints for programs, with stable names; `docs/app.md` shows how to call them with gradio_client."""

from __future__ import annotations

import dataclasses
from inspect import Parameter, Signature
from typing import Any

import gradio as gr

from .components import Page
from .controls import SWEEPS
from .events.calls import MODEL_QUEUE, owner_of, told
from .handlers import Handlers
from .limits import Request, parse_sweep
from .store import Run

_CLIPS = ("dense", "sparse", "side_by_side")


def add_api(page: Page, handlers: Handlers) -> None:
    """Add the endpoints; their components are not shown."""

    def compare(*arguments: Any) -> tuple[Any, ...]:
        *values, request, progress = arguments
        with told():
            run = handlers.compare(Request(*values), owner=owner_of(request), tell=_teller(progress))
        return *(_published(run, key) for key in _CLIPS), {"id": run.id, "report": run.report}

    def sweep(*arguments: Any) -> dict[str, Any]:
        *values, swept, request, progress = arguments
        with told():
            asked = Request(*values)
            numbers = parse_sweep(swept, asked.method)
            runs = handlers.sweep(asked, numbers, owner=owner_of(request), tell=_teller(progress))
        return {"runs": [{"id": run.id, "report": run.report} for run in runs]}

    def attention(run_id: Any, layer: Any, step: Any, head: Any, frame: Any, row: Any, column: Any) -> tuple[Any, ...]:
        with told():
            spot = handlers.spot_view(run_id, layer, step, head, (frame, row, column))
            mask = handlers.mask_view(run_id, layer, step, head)
        counts: dict[str, Any] = {"attended": spot.attended, "tokens": spot.tokens}
        if spot.means:
            counts["means"] = {str(size): count for size, count in spot.means}
        return mask, spot.picture, counts

    def masks(run_id: Any) -> dict[str, Any]:
        with told():
            found = handlers.masks(run_id)
        layers = {layer: found.steps_of(layer) for layer in found.layer_names()}
        return {"layers": layers, "heads": found.heads, "grid": found.grid_thw, "block_size": found.block_size}

    def runs() -> dict[str, Any]:
        found = handlers.runs()
        return {"runs": [{"id": r.id, "kept": r.kept, "example": r.example, "report": r.report} for r in found]}

    def cancel(request: gr.Request) -> int:
        return handlers.cancel(owner_of(request))

    def _published(run: Run, key: str) -> str | None:
        path = handlers.store.publish(run, key)
        return None if path is None else str(path)

    with page.blocks, gr.Column(visible=False):
        caller = gr.Button()
        clips = [gr.File(label=key) for key in _CLIPS]
        answer = gr.JSON(label="report")
        swept = gr.Textbox(SWEEPS["ba-att"], label="sparsities, %, or numbers of top k")
        run_id, layer = gr.Textbox(label="run"), gr.Textbox(label="layer")
        numbers = [gr.Number(label=name, precision=0) for name in ("step", "head", "frame", "row", "column")]
        pictures = [gr.Image(label=name, type="pil", format="png") for name in ("mask", "attended")]
        ask = page.ask.list()
        more = Parameter("values", Parameter.POSITIONAL_OR_KEYWORD, default=SWEEPS["ba-att"])
        caller.click(_named(compare), ask, [*clips, answer], api_name="compare", preprocess=False, **MODEL_QUEUE)
        caller.click(
            _named(sweep, more),
            [*ask, swept],
            answer,
            api_name="sweep",
            preprocess=False,
            **MODEL_QUEUE,
        )
        caller.click(masks, run_id, answer, api_name="masks", preprocess=False)
        caller.click(attention, [run_id, layer, *numbers], [*pictures, answer], api_name="attention", preprocess=False)
        caller.click(runs, None, answer, api_name="runs")
        caller.click(cancel, None, numbers[0], api_name="cancel", queue=False)


def _teller(progress: gr.Progress) -> Any:
    return lambda share, text: progress(share, desc=text)


def _named(function: Any, *more: Parameter) -> Any:
    """Give a function of `*arguments` the names that programs use; Gradio adds the last two, which it knows so."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    fields = dataclasses.fields(Request)
    defaults = [Parameter.empty if field.default is dataclasses.MISSING else field.default for field in fields]
    given = [Parameter(field.name, kind, default=value) for field, value in zip(fields, defaults, strict=True)]
    request = Parameter("request", kind, annotation=gr.Request, default=None)
    progress = Parameter("progress", kind, default=gr.Progress())
    function.__signature__ = Signature([*given, *more, request, progress])
    function.__annotations__ = {"request": gr.Request}
    return function
