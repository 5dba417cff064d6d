"""Read settings: nested frozen dataclasses from TOML or JSON, with dotted overrides."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...errors import UserInputError, os_reason


@dataclass(frozen=True)
class Settings:
    """Base of the settings of a whole run."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from nested mappings; absent keys keep their defaults.

        Raises:
            UserInputError: an unknown key or a value out of range.
        """
        settings: Self = build_settings(cls, values)
        return settings

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """Read a file and apply overrides; see `read_settings_file`."""
        return cls.from_dict(read_settings_file(path, overrides))


def read_settings_file(path: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML or JSON file and apply overrides.

    Args:
        path: `.json` or `.toml`; None = an empty mapping.
        overrides: `part.name=value` with the value in JSON (a bare word is a string), for example `dit.seconds=600`.

    Raises:
        UserInputError: the file cannot be read, or an override has another form.
    """
    values = _read(path) if path is not None else {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise UserInputError(f"an override must look like part.name=value, got {item!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        *parents, name = key.split(".")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise UserInputError(f"an override must name a single setting, got {item!r}")
        target[name] = value
    return values


def build_settings(cls: type, values: Any, where: str = "config") -> Any:
    """Build a dataclass from nested mappings; absent keys keep their defaults.

    Raises:
        UserInputError: an unknown key, a value of another type, or any error of the dataclass.
    """
    if not isinstance(values, Mapping):
        raise UserInputError(f"{where} must be a mapping, got {type(values).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - {item.name for item in dataclasses.fields(cls)})
    if unknown:
        raise UserInputError(f"{where} has unknown keys {unknown}; known: {sorted(hints)}")
    return cls(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".json", ".toml"):
        raise UserInputError(f"settings must be a .json or .toml file, got {path.name}")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserInputError(f"settings must be a readable file, got {path}: {os_reason(error)}") from None
    except ValueError as error:
        raise UserInputError(f"settings must be valid {path.suffix[1:].upper()}, got {path}: {error}") from None
    if not isinstance(values, dict):
        raise UserInputError(f"settings must hold a mapping, got {type(values).__name__}")
    return values


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build_settings(typing.cast(type, hint), value, where)
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        if value is None:
            return None
        return _convert(next(choice for choice in arguments if choice is not type(None)), value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UserInputError(f"{where} must be a list, got {value!r}")
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    choices = arguments or (hint,)  # of `int | str` either
    accepted = (*choices, int) if float in choices else choices
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in choices):
        raise UserInputError(f"{where} must be {' or '.join(choice.__name__ for choice in choices)}, got {value!r}")
    return value if arguments else hint(value)
