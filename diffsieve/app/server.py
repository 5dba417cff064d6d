"""Start the page: closed to other machines unless a user name and a password are set; no route that is not needed."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compare.report import environment
from ..errors import UserInputError
from ..eval.weights import cache_folder
from .handlers import Handlers
from .limits import Limits
from .models import Shelf, offered_models
from .store import Bounds, Store
from .views import hardware

logger = logging.getLogger(__name__)

USER, PASSWORD = "DIFFSIEVE_APP_USER", "DIFFSIEVE_APP_PASSWORD"
_MIN_PASSWORD = 8
MAX_BODY = 1 << 20
"""Bytes of a request; the largest that the page sends are a few kilobytes."""

# Routes of Gradio that this page has no use for: uploads, proxies, addresses as files, shared states.
_CLOSED = re.compile(
    r"/(gradio_api/)?(upload|upload_progress|proxy=|file=https?:|file/|stream/|deep_link|component_server|dev/|theme/|vibe)"
)
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    # Gradio's page has inline scripts and styles; fetches, frames and forms go to this server alone.
    b"content-security-policy": (
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; "
        b"connect-src 'self' data: blob:; "
        b"worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
    ),
}


def default_folder() -> Path:
    """Return where runs are kept unless a folder is given."""
    return cache_folder() / "app"


@dataclass(frozen=True)
class ServerConfig:
    """How the server runs.

    Args:
        models: to offer beside the embedded ones: folders in diffusers format or hub ids.
        device: see `load_pipeline`.
        dtype: see `load_pipeline`.
        host: address to listen at. Any but this machine's own needs a user name and a password in the environment.
        port: to listen at; `None` takes the first free one from 7860.
        share: make the page public through Gradio's server; needs a user name and a password too.
        folder: private folder of the runs.
        queue: requests that may wait.
        bounds: when runs go.
        limits: of a request; default: by the device.
    """

    models: tuple[str, ...] = ()
    device: str | None = None
    dtype: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    folder: Path | None = None
    queue: int = 64
    bounds: Bounds = field(default_factory=Bounds)
    limits: Limits | None = None


def credentials(host: str, *, share: bool) -> tuple[str, str] | None:
    """Return user name and password from the environment, or `None` where none are set and none are needed.

    Raises:
        UserInputError: the address can be reached from other machines and they are missing, or the password is short.
    """
    user, password = os.environ.get(USER, ""), os.environ.get(PASSWORD, "")
    if user and password:
        if len(password) < _MIN_PASSWORD:
            raise UserInputError(f"{PASSWORD} must have at least {_MIN_PASSWORD} characters, got {len(password)}")
        return user, password
    if user or password:
        raise UserInputError(f"{USER} and {PASSWORD} must be set together, got {USER if user else PASSWORD} alone")
    if share or not is_local(host):
        where = "a shared page" if share else f"the address {host}"
        raise UserInputError(f"{where} can be reached by others: set {USER} and {PASSWORD} in the environment")
    return None


def is_local(host: str) -> bool:
    """Whether an address is this machine's own, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Refuses requests that the page never sends, and adds headers that bind browsers to this server.

    Args:
        app: the ASGI application behind.
        local: refuse requests that name another host than this machine's own: a foreign page whose name was made to
            point at this machine would send those, and its browser would let it read the answers.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], local: bool = False) -> None:
        self._app, self._local = app, local

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _CLOSED.match(scope["path"]):
            await _refuse(send, 403, b"not offered by this server")
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._local and not is_local(re.sub(r":\d*$", "", host).strip("[]")):
            await _refuse(send, 403, b"without a password this server answers to localhost and 127.0.0.1 alone")
            return
        length = headers.get(b"content-length", b"0")
        if (not length.isdigit() or int(length) > MAX_BODY) or headers.get(b"transfer-encoding"):
            await _refuse(send, 413, b"the request is too large")
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((n, v) for n, v in _HEADERS.items() if n not in given)]
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _refuse(send: Any, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: of the page on this machine.
        handlers: what it calls.
        blocks: Gradio's object.
    """

    url: str
    handlers: Handlers
    blocks: Any


@contextmanager
def serve(config: ServerConfig, *, shelf: Shelf | None = None, examples: Path | None = None) -> Iterator[Server]:
    """Load the first model, start the server, and stop it at the end of the block.

    Args:
        config: how it runs.
        shelf: models in place of those of `config`.
        examples: folder with example runs in place of those that ship.

    Raises:
        UserInputError: Gradio is not installed, no credentials for an open address, no such model, a folder that is in
            use, or a port that is taken.
    """
    account = credentials(config.host, share=config.share)
    _set_environment()
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise UserInputError('the app needs Gradio: pip install "diffsieve[app]"') from None
    shelf = shelf or Shelf(offered_models(config.models), device=config.device, dtype=config.dtype)
    store = Store(config.folder or default_folder(), config.bounds, *([examples] if examples is not None else []))
    first = shelf.get(shelf.names[0])
    store.open()
    before = os.environ.get("GRADIO_TEMP_DIR")
    # Gradio's own copies of what is sent lie beside ours, and go with them.
    os.environ["GRADIO_TEMP_DIR"] = str(store.served)
    blocks = None
    try:
        from .api import add_api
        from .events import wire
        from .look import css, head, theme
        from .page import build_page

        place = environment(first.pipe)
        limits = config.limits or Limits.for_device(place["device"])
        handlers = Handlers(shelf, store, limits)
        page = build_page(shelf.names, first, limits, hardware(place), [run for run in store.runs() if run.example])
        blocks = page.blocks
        wire(page, handlers)
        add_api(page, handlers)
        blocks.queue(max_size=config.queue, default_concurrency_limit=4)
        try:
            _, url, _ = blocks.launch(
                server_name=config.host,
                server_port=config.port,
                share=config.share,
                auth=account,
                prevent_thread_lock=True,
                quiet=True,
                ssr_mode=False,
                show_error=False,
                strict_cors=True,
                enable_monitoring=False,
                max_file_size=1,
                allowed_paths=[],
                footer_links=["api"],
                pwa=False,
                mcp_server=False,
                # A class with its arguments, which is all that the middleware list needs.
                app_kwargs={
                    "middleware": [(Gate, (), {"local": account is None})],
                    "docs_url": None,
                    "redoc_url": None,
                },
                theme=theme(),
                css=css(),
                head=head(),
            )
        except OSError as error:
            raise UserInputError(f"port must be free, got {config.port}: {' '.join(str(error).split())}") from None
        yield Server(url, handlers, blocks)
        handlers.jobs.cancel_all()
    finally:
        if blocks is not None:
            blocks.close(verbose=False)
        store.close()
        if before is None:
            os.environ.pop("GRADIO_TEMP_DIR", None)
        else:
            os.environ["GRADIO_TEMP_DIR"] = before


def _set_environment() -> None:
    """Keep Gradio from asking other servers anything; it reads these when it is imported and when it starts."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GRADIO_SHARE", "False")
