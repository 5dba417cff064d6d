"""Servers for tests, over the tiny pipeline with random weights."""

from contextlib import contextmanager
from pathlib import Path

from diffsieve.app.make_examples import make_examples
from diffsieve.app.models import Shelf
from diffsieve.app.server import ServerConfig, serve
from tests.tiny import wan_pipeline

# The example of the tiny servers: what ships would need the embedded model.
EXAMPLE = {"frames": 9, "width": 32, "height": 32, "steps": 4, "guidance_scale": 1.0, "min_tokens": 0}


class Tiny:
    """A loader that makes the tiny pipeline and counts; `pipe` is the last one."""

    def __init__(self):
        self.loads = 0
        self.pipe = None

    def __call__(self, model, *, device=None, dtype=None):
        self.loads += 1
        self.pipe = wan_pipeline()
        return self.pipe


def tiny_examples(folder: Path) -> Path:
    make_examples(folder, pipe=wan_pipeline(), chosen=((0, 0.5),), **EXAMPLE)
    return folder


@contextmanager
def tiny_server(root: Path, *, load=None, examples=None, **config):
    shelf = Shelf({"tiny": "tiny"}, load=load or Tiny())
    settings = ServerConfig(folder=root / "store", **config)
    with serve(settings, shelf=shelf, examples=examples or root / "no-examples") as server:
        yield server
