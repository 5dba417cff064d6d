"""What the page does: each event calls one handler and shows what it returns."""

from __future__ import annotations

from ..components import Page
from ..handlers import Handlers
from .attention import AttentionEvents
from .gallery import GalleryEvents
from .runs import RunEvents
from .settings import SettingsEvents
from .shown import Shown


def wire(page: Page, handlers: Handlers) -> None:
    """Attach the events of the page; programs have their own, see `api`."""
    attention = AttentionEvents(page, handlers)
    settings = SettingsEvents(page, handlers)
    shown = Shown(page, handlers, attention)
    for events in (
        RunEvents(page, handlers, shown),
        settings,
        attention,
        GalleryEvents(page, handlers, shown, settings),
    ):
        with page.blocks:
            events.attach()
