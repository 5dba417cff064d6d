"""Handlers, a server and its page over a tiny pipeline, and the smallest request that has every part."""

import dataclasses

import pytest

from diffsieve.app.handlers import Handlers
from diffsieve.app.limits import Limits, Request
from diffsieve.app.models import Shelf
from diffsieve.app.store import Bounds, Store
from tests.app.browser import launched, opened
from tests.app.serving import Tiny, tiny_examples, tiny_server

# 9 frames of 32 x 32 are 48 tokens: 6 blocks of 8.
SMALL = Request(
    model="tiny",
    prompt="a cat moves left",
    negative_prompt="",
    method="ba-att",
    preset="default",
    sparsity=0.5,
    warmup=0.25,
    steps=4,
    frames=9,
    width=32,
    height=32,
    seed=0,
    guidance=1.0,
    block_size=8,
    min_tokens=0,
)


def small(**changes) -> Request:
    return dataclasses.replace(SMALL, **changes)


def make_handlers(root, *, bounds=None, limits=None, examples=None, load=None):
    store = Store(root, bounds or Bounds(), examples or root / "no-examples")
    store.open()
    return Handlers(Shelf({"tiny": "tiny"}, load=load or Tiny()), store, limits or Limits())


@pytest.fixture
def handlers(tmp_path):
    made = make_handlers(tmp_path / "store")
    yield made
    made.store.close()


@pytest.fixture
def told():
    """A list of what a run told, and the callback that fills it."""
    lines = []
    return lines, lambda share, text: lines.append((share, text))


@pytest.fixture(scope="module")
def browser():
    """A Chromium for the tests of one file, which are skipped where there is none."""
    with launched() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with one example, for the tests of one file."""
    root = tmp_path_factory.mktemp("server")
    with tiny_server(root, examples=tiny_examples(root / "examples")) as running:
        yield running


@pytest.fixture
def page(browser, server):
    """The page of `server`, on which nothing may go wrong."""
    with opened(browser, server.url) as watched:
        yield watched.page
