"""Results: one JSON file for each operation, rewritten whole after every row, added to by later calls."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..compare.files import write_json
from ..compare.report import now, versions
from ..errors import UserInputError
from .config import BenchConfig
from .peers import PEERS, has_module

SCHEMA = "diffsieve.bench/1"


class Results:
    """The file of one operation in a leg.

    Rows of a file are of one device, one set of versions and settings: anything else is refused, because figures that
    stand side by side are read as comparable.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], command: str) -> None:
        """Args: path: of the file, which may exist; head: of `head_of`; command: that of this leg.

        Raises:
            UserInputError: the file is of something else.
        """
        self.path = path
        self.data: dict[str, Any] = {"schema": SCHEMA, **head, "legs": [], "absent": {}, "rows": []}
        if path.exists():
            self.data = read_results(path)
            for name, value in head.items():
                if self.data.get(name) != json.loads(json.dumps(value)):
                    raise UserInputError(
                        f"out must be a new folder or one with results of the same {name}, got {path} "
                        f"with {self.data.get(name)} where this run has {value}"
                    )
        self.data["legs"].append({"command": command, "started": now()})

    @property
    def leg(self) -> int:
        """Number of the present call, from 0."""
        return len(self.data["legs"]) - 1

    def row(self, problem: str, name: str) -> dict[str, Any] | None:
        """The row of a variant, `None` where there is none."""
        for row in self.data["rows"]:
            if (row["problem"], row["name"]) == (problem, name):
                found: dict[str, Any] = row
                return found
        return None

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, or put it into the place of the one of the same problem and name, and write the file."""
        rows = self.data["rows"]
        for number, old in enumerate(rows):
            if (old["problem"], old["name"]) == (row["problem"], row["name"]):
                rows[number] = dict(row)
                break
        else:
            rows.append(dict(row))
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.data)


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a result file.

    Raises:
        UserInputError: not a file of `diffsieve bench`.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path} must be a result of diffsieve bench, got: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("rows"), list):
        raise UserInputError(f"{path} must be a result of diffsieve bench (schema {SCHEMA}), got something else")
    return data


def head_of(operation: str, config: BenchConfig, settings: Mapping[str, Any], timer: str) -> dict[str, Any]:
    """What must be the same in all legs: operation, device, versions, the state of the kernels, settings."""
    device = torch.device(str(config.device))
    name = torch.cuda.get_device_name(device) if config.on_gpu else cpu_name()
    found: dict[str, Any] = versions() | {"python": platform.python_version()}
    if config.on_gpu:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    found |= peer_versions()
    common = {"dtype": config.dtype, "budget_ms": config.budget_ms}
    if not config.on_gpu:
        common["threads"] = torch.get_num_threads()
    return {
        "operation": operation,
        "device": name,
        "versions": found | {"kernels": kernels_digest()},
        "timer": timer,
        "settings": common | dict(settings),
    }


def peer_versions() -> dict[str, str]:
    """The versions of the packages that a row may have measured, where installed.

    "unknown" is that of a module without the metadata of its package, such as a folder that was copied: it is measured
    too, and that it was there has to be told.
    """
    found = {}
    for peer in PEERS:
        if peer.package is None or peer.module is None:
            continue
        try:
            found[peer.package] = version(peer.package)
        except PackageNotFoundError:
            if has_module(peer.module):
                found[peer.package] = "unknown"
    return found


def kernels_digest() -> str:
    """The state of what is measured: SHA-256 of the sources of the kernels and processors, 12 digits."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for room in ("kernels", "processors") for path in (package / room).rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """The name of the processor, as far as the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
