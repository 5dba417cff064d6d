"""The models that the page offers: fixed when the server starts, loaded once, shared by all who use it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserInputError, is_out_of_memory
from ..pipelines.defaults import EMBEDDED, GenerationDefaults, generation_defaults, makes_pictures
from ..pipelines.loading import load_pipeline, model_source, weights_digest
from ..processors import LLSAConfig, trained_llsa

logger = logging.getLogger(__name__)


def offered_models(extra: Sequence[str] = ()) -> dict[str, str]:
    """Return the models by the name that the page shows: the embedded ones that are installed, then those named.

    The page starts with the first.

    Args:
        extra: folders in diffusers format, or hub ids. A folder is shown by its own name alone.

    Raises:
        UserInputError: no such model, a folder whose model_index.json is damaged, two of the same name, or none at all.
    """
    models: dict[str, str] = {}
    for name in EMBEDDED:
        try:
            model_source(name)
        except UserInputError:
            continue
        models[name] = name
    for model in extra:
        model_source(model)
        if model in models:
            continue
        folder = Path(model).expanduser()
        _model_index(folder)
        name = folder.resolve().name if folder.is_dir() else model
        if name in models:
            raise UserInputError(f"model names must differ, got two called {name}")
        models[name] = model
    if not models:
        raise UserInputError("no model is installed: name one with --model")
    return models


@dataclass(frozen=True)
class LoadedModel:
    """A pipeline and what the page must know of it.

    Args:
        name: that the page shows.
        pipe: the pipeline.
        defaults: what it is run with by default.
        weights: digest.
    """

    name: str
    pipe: Any
    defaults: GenerationDefaults
    weights: str

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes of a model of pictures; `None` for a model of clips."""
        return self.defaults.prompts if makes_pictures(self.pipe) else None

    @property
    def trained(self) -> LLSAConfig | None:
        """The sparse attention that the model was trained with, if any."""
        return trained_llsa(self.pipe)

    @property
    def method(self) -> str:
        """The method to begin with."""
        return "ba-att" if self.trained is None else "llsa"


class Shelf:
    """Loads each model when it is first asked for, and keeps it.

    Args:
        models: source by name, see `offered_models`.
        device: see `load_pipeline`.
        dtype: see `load_pipeline`.
        load: for tests.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        load: Callable[..., Any] = load_pipeline,
    ) -> None:
        self._models, self._device, self._dtype, self._load = dict(models), device, dtype, load
        self._loaded: dict[str, LoadedModel] = {}
        self._guard = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def loaded(self, name: Any) -> LoadedModel | None:
        """Return a model that is loaded, else `None`."""
        return self._loaded.get(name) if isinstance(name, str) else None

    def pictures(self, name: str) -> bool | None:
        """Return whether a model makes pictures, without loading it; `None` where it is in no folder here.

        Raises:
            UserInputError: the model_index.json of its folder is damaged.
        """
        model = self.loaded(name)
        if model is not None:
            return model.classes is not None
        index = self._index(name)
        return None if index is None else index.get("_class_name") == "PixelDiTPipeline"

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the classes of a model of pictures without loading it; `None` where its folder does not name them.

        Raises:
            UserInputError: the model_index.json of its folder is damaged.
        """
        model = self.loaded(name)
        if model is not None:
            return model.classes
        names = (self._index(name) or {}).get("class_names")
        return tuple(names) if names else None

    def _index(self, name: str) -> dict[str, Any] | None:
        if name not in self._models:
            return None
        return _model_index(EMBEDDED.get(name) or Path(self._models[name]).expanduser())

    def get(self, name: str) -> LoadedModel:
        """Return a model, loading it the first time.

        Raises:
            UserInputError: a name that is not offered, weights that cannot be read, or that the memory does not hold.
        """
        if name not in self._models:
            raise UserInputError(f"model must be one of {', '.join(self._models)}, got {name!r}")
        with self._guard:
            if name not in self._loaded:
                pipe = self._load_or_say_what_is_there(name)
                self._loaded[name] = LoadedModel(name, pipe, generation_defaults(pipe), weights_digest(pipe))
            return self._loaded[name]

    def _load_or_say_what_is_there(self, name: str) -> Any:
        try:
            return self._load(self._models[name], device=self._device, dtype=self._dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.error("%s was not loaded", name, exc_info=error)
            there = f" beside {', '.join(self._loaded)}, which the server keeps" if self._loaded else ""
            raise UserInputError(f"model must fit into the memory of the server, got {name}{there}") from None


def _model_index(folder: Path) -> dict[str, Any] | None:
    """Return what the model_index.json of a folder holds; `None` where there is none, as for a hub id."""
    file = folder / "model_index.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError):
        raise UserInputError(f"model_index.json of the model {folder.name} must be JSON, got something else") from None
    if not isinstance(found, dict):
        raise UserInputError(
            f"model_index.json of the model {folder.name} must hold a JSON object, got a {type(found).__name__}"
        )
    names = found.get("class_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserInputError(
            f"class_names in model_index.json of the model {folder.name} must be a list of names, got {names!r:.80}"
        )
    return found
