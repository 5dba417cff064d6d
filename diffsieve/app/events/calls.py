"""How events and endpoints are called: which ones wait for the model, who asks, and how a failure is told."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from .. import views
from ..errors import explain

# All events that use a model share one place in the queue.
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
# Events of the page alone: not in the list of endpoints, though anybody can send to their numbers.
PRIVATE: dict[str, Any] = {"api_visibility": "private"}


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
