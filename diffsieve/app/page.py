"""The page: what is on it and where. What it does is in `events`, how it looks in `look`."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from ..compare import METHODS
from . import views
from .components import Ask, Attention, Followed, Gallery, Page, Results
from .controls import model_controls, sweep_controls
from .limits import PRESETS, Limits
from .models import LoadedModel
from .store import Run


def build_page(models: list[str], first: LoadedModel, limits: Limits, place: str, examples: list[Run]) -> Page:
    """Lay the page out, without events.

    Args:
        models: names that may be chosen.
        first: the model that the page starts with.
        limits: of a request.
        place: where it runs, in words.
        examples: runs that load at once.
    """
    # Files that Gradio copied go after a day; the sweep runs every hour.
    with gr.Blocks(title="diffsieve", delete_cache=(3600, 86400), analytics_enabled=False) as blocks:
        gr.HTML(
            '<header class="ds-header"><h1>diffsieve</h1>'
            "<p>the same noise twice: dense attention against sparse attention</p>"
            f"<p>{escape(place)}</p></header>"
        )
        current = gr.State(None)
        followed = gr.State(Followed(first.name, first.method))
        start = model_controls(first, limits)
        with gr.Row(elem_id="ds-main"):
            with gr.Column(elem_id="ds-ask"):
                prompt = gr.Textbox(label="Prompt", lines=2, max_lines=5, max_length=limits.prompt, **start["prompt"])
                class_name = gr.Dropdown(label="Class", interactive=True, **start["class_name"])
                with gr.Row(elem_id="ds-buttons"):
                    run = gr.Button("Compare", variant="primary", size="md", elem_id="ds-run")
                    cancel = gr.Button("Cancel", variant="stop", size="md", elem_id="ds-cancel", interactive=False)
                status = gr.HTML(views.status("Ready."), elem_id="ds-told")
                shown = [[views.run_title(run)] for run in examples]
                labels = [f"{run.clip['prompt']}, {views.run_label(run)}" for run in examples]
                chosen = gr.Dataset(
                    label="Examples, shown at once",
                    components=[gr.Textbox(visible=False)],
                    samples=shown,
                    sample_labels=labels or None,
                    type="index",
                    visible=bool(examples),
                    elem_id="ds-examples",
                )
            with gr.Column(elem_id="ds-settings"):
                ask = _settings(models, first, limits, start, prompt, class_name)
            with gr.Column(elem_id="ds-results"), gr.Tabs(selected="compare") as tabs:
                results, attention = _result_tabs()
                with gr.Tab("Sweep", id="sweep"):
                    values = gr.Textbox(max_length=100, **sweep_controls(first.method, limits.sweep))
                    sweep_run = gr.Button("Run the sweep", variant="primary", size="md")
                    sweep = gr.HTML(
                        views.empty(
                            "No sweep yet",
                            "Quality, density and time over the sparsity, with LLSA over top k, as curves and a table.",
                        )
                    )
                gallery = _gallery()
    return Page(blocks, ask, run, cancel, status, chosen, tabs, current, followed, results, attention, values,
                sweep_run, sweep, gallery)  # fmt: skip


def _settings(
    models: list[str],
    first: LoadedModel,
    limits: Limits,
    start: dict[str, dict[str, Any]],
    prompt: Any,
    class_name: Any,
) -> Ask:
    with gr.Group():
        model = gr.Dropdown(models, value=first.name, label="Model", interactive=True, visible=True)
        with gr.Row():
            methods = [(method.label, name) for name, method in METHODS.items()]
            method = gr.Dropdown(methods, label="Method", min_width=120, **start["method"])
            preset = gr.Dropdown(list(PRESETS), value="default", label="Preset", min_width=120, **start["preset"])
        sparsity = gr.Slider(0, 0.95, value=0.5, step=0.05, label="Sparsity, share of block pairs skipped",
                             **start["sparsity"])  # fmt: skip
        topk = gr.Number(label="Top k, blocks kept per level", **start["topk"])
        warmup = gr.Slider(0, 1, value=0.2, step=0.05, label="Warm-up, share of the steps that run dense first",
                           **start["warmup"])  # fmt: skip
    with gr.Group():
        with gr.Row():
            steps = gr.Number(label="Steps", min_width=90, **start["steps"])
            frames = gr.Number(label="Frames", min_width=90, **start["frames"])
            seed = gr.Number(0, label="Seed", min_width=90)
        with gr.Row():
            width = gr.Number(label="Width, px", min_width=90, **start["width"])
            height = gr.Number(label="Height, px", min_width=90, **start["height"])
            guidance = gr.Number(label="Guidance", step=0.5, min_width=90, **start["guidance"])
    with gr.Accordion("More settings", open=False):
        negative = gr.Textbox(
            "", label="Negative prompt", lines=1, max_length=limits.prompt, **start["negative_prompt"]
        )
        with gr.Row():
            block_size = gr.Number(label="Block size, tokens", min_width=120, **start["block_size"])
            min_tokens = gr.Number(label="Shortest sparse sequence, tokens", info="empty: where it pays",
                                   min_width=120, **start["min_tokens"])  # fmt: skip
    return Ask(model=model, prompt=prompt, negative_prompt=negative, method=method, preset=preset, sparsity=sparsity,
               warmup=warmup, steps=steps, frames=frames, width=width, height=height, seed=seed, guidance=guidance,
               block_size=block_size, min_tokens=min_tokens, topk=topk, class_name=class_name)  # fmt: skip


def _result_tabs() -> tuple[Results, Attention]:
    with gr.Tab("Compare", id="compare"):
        player = gr.HTML(
            views.empty(
                "Nothing compared yet",
                "Press Compare, or take an example, which is there at once. What dense and sparse attention made from "
                "the same noise then stands here side by side.",
            )
        )
        headline = gr.HTML()
    with gr.Tab("Metrics", id="metrics"):
        metrics = gr.HTML(
            views.empty("No metrics yet", "PSNR, SSIM and LPIPS against the dense side, of clips per frame.")
        )
        curves = gr.HTML()
        cost = gr.HTML()
    with gr.Tab("Attention", id="attention"):
        with gr.Group(visible=False) as choice, gr.Row():
            layer = gr.Dropdown([], label="Layer", interactive=True, min_width=140)
            step = gr.Dropdown([], label="Step", interactive=True, min_width=110)
            head_number = gr.Slider(0, 1, value=0, step=1, label="Head", interactive=True, min_width=160)
        told = gr.HTML(
            views.empty(
                "No block mask yet",
                "Compare first, or take an example. Which blocks of keys each head looked at, step by step, and which "
                "tokens one query attended to, then stand here.",
            )
        )
        picture = gr.Image(show_label=False, container=False, type="pil", format="png", interactive=False, buttons=[],
                           elem_id="ds-spot", label="Where the query looked", visible=False,
                           alt_text="Frames; tokens that the query did not attend to are dark")  # fmt: skip
        with gr.Row(visible=False) as query:
            with gr.Column(scale=2, min_width=250), gr.Group():
                frame = gr.Slider(0, 1, value=0, step=1, label="Query: frame of tokens")
                row = gr.Slider(0, 1, value=0, step=1, label="Query: row of tokens")
                column = gr.Slider(0, 1, value=0, step=1, label="Query: column of tokens")
            with gr.Column(scale=3, min_width=300):
                mask = gr.Image(show_label=False, container=False, type="pil", format="png", interactive=False,
                                buttons=[], elem_id="ds-mask", label="Block mask",
                                alt_text="Block mask of the chosen layer, head and step")  # fmt: skip
    with gr.Tab("Run info", id="info"):
        facts = gr.HTML(views.empty("No run yet", "What was compared, on which hardware, and files to download."))
        files = gr.HTML()
        code = gr.Code(label="The same in Python", language="python", interactive=False, lines=4)
        with gr.Accordion("Report, JSON", open=False):
            report = gr.JSON(label="report.json", show_label=False, open=False, max_height=420)
    return (
        Results(headline, player, curves, metrics, cost, facts, files, code, report),
        Attention(choice, query, layer, head_number, step, mask, picture, told, frame, row, column),
    )


def _gallery() -> Gallery:
    with gr.Tab("Gallery", id="gallery"):
        gr.HTML('<h3 class="ds-part">Finished runs: choose one to show it</h3>')
        none = gr.HTML(views.empty("No finished run yet", "Every comparison and every run of a sweep is listed here."))
        pictures = gr.Gallery(
            label="Finished runs",
            visible=False,
            show_label=False,
            columns=5,
            height="auto",
            interactive=False,
            object_fit="cover",
            allow_preview=False,
            buttons=[],
            fit_columns=False,
            elem_id="ds-gallery",
        )
        ids = gr.State([])
        with gr.Row(equal_height=True):
            told = gr.HTML(views.keeping(None))
            keep = gr.Button("Keep the run that is shown", size="md", min_width=200, scale=0)
        gr.HTML('<h3 class="ds-part">Two runs against each other</h3>')
        with gr.Row():
            left = gr.Dropdown([], label="Left", min_width=240, interactive=True)
            right = gr.Dropdown([], label="Right", min_width=240, interactive=True)
        both = gr.Button("Show both sparse results", variant="primary", size="md")
        player = gr.HTML()
        table = gr.HTML()
    return Gallery(none, pictures, ids, keep, told, left, right, both, player, table)
