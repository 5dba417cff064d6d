"""How the page looks: Gradio's theme, the style sheet, and the script of the player."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

_ASSETS = Path(__file__).parent / "assets"


def theme() -> gr.themes.Base:
    """Return the look: the fonts of the machine, so that nothing is fetched, and quiet colours."""
    blue = gr.themes.Color("#f0f6fc", "#e0ecf8", "#c3daf0", "#98c0e4", "#659fd3", "#3f80bd", "#2563a8", "#1f5290",
                           "#1b4474", "#173a62", "#102742")  # fmt: skip
    return gr.themes.Base(
        primary_hue=blue,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_sm,
        text_size=gr.themes.sizes.text_md,
        font=[
            "Inter",
            "-apple-system",
            "Segoe UI",
            "Roboto",
            "Helvetica Neue",
            "Liberation Sans",
            "Arial",
            "sans-serif",
        ],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    ).set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_text_color="white",
        button_primary_background_fill_dark="*primary_600",
        block_label_text_size="*text_sm",
        block_title_text_size="*text_sm",
        block_title_text_weight="550",
        block_border_width="1px",
        block_shadow="none",
        input_border_width="1px",
        slider_color="*primary_600",
    )


def head() -> str:
    """Return what goes into the page's head: the player."""
    return f"<script>{(_ASSETS / 'player.js').read_text(encoding='utf-8')}</script>"


def css() -> str:
    return (_ASSETS / "app.css").read_text(encoding="utf-8")
