"""Loading by name, folder and hub id: what is accepted, what is refused, and how."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from diffsieve.errors import UserInputError
from diffsieve.pipelines import loading
from diffsieve.pipelines.loading import (
    load_pipeline,
    model_name,
    model_source,
    resolve_device,
    resolve_dtype,
    weights_digest,
)
from tests.tiny import wan_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    wan_pipeline(layers=1).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16)], ids=["default", "bf16"]
)
def test_a_folder_loads_with_the_vae_in_float32(folder, dtype, expected):
    pipe = load_pipeline(str(folder), device="cpu", dtype=dtype)
    assert isinstance(pipe, WanPipeline)
    assert pipe.transformer.proj_out.weight.dtype == expected
    assert pipe.text_encoder.dtype == expected
    assert pipe.vae.dtype == torch.float32
    assert pipe.device == torch.device("cpu")


def test_the_name_of_a_loaded_model_has_no_path(folder):
    assert model_name(load_pipeline(str(folder), device="cpu")) == "tiny"
    assert model_name(wan_pipeline(layers=1)) == "WanPipeline"
    assert model_name(load_pipeline("mini-wan", device="cpu")) == "mini-wan"


def test_pickled_weights_are_not_read(folder, tmp_path):
    copy = tmp_path / "pickled"
    shutil.copytree(folder, copy)
    (copy / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    wan_pipeline(layers=1).transformer.save_pretrained(copy / "transformer", safe_serialization=False)
    assert list((copy / "transformer").glob("*.bin"))
    with pytest.raises(UserInputError, match=r"cannot be loaded from .*safetensors"):
        load_pipeline(str(copy))


def test_broken_weights_are_one_clear_error(folder, tmp_path):
    copy = tmp_path / "broken"
    shutil.copytree(folder, copy)
    (copy / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserInputError, match=f"model {copy} cannot be loaded"):
        load_pipeline(str(copy))


def test_a_checkpoint_that_lacks_a_tensor_names_it(folder, tmp_path):
    copy = tmp_path / "lacking"
    shutil.copytree(folder, copy)
    file = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["blocks.0.attn1.norm_k.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserInputError, match=r"got none for transformer\.blocks\.0\.attn1\.norm_k\.weight"):
        load_pipeline(str(copy), device="cpu")


@pytest.mark.parametrize("model", ["./missing", "/missing/model", "a/b/c", "missing", "~/missing-model", "", "a b/c"])
def test_a_missing_path_is_named(model):
    with pytest.raises(UserInputError, match="model must be one of mini-wan, mini-pixel-dit, an existing folder or"):
        load_pipeline(model)


def test_a_folder_without_a_pipeline_is_named(tmp_path):
    with pytest.raises(UserInputError, match=r"model must be a folder with a model_index.json, got"):
        load_pipeline(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UserInputError, match="got the file"):
        load_pipeline(str(file))


@pytest.mark.parametrize("name", ["mini-wan", "mini-pixel-dit"])
def test_missing_weights_of_an_embedded_model_are_said(tmp_path, monkeypatch, name):
    monkeypatch.setitem(loading.EMBEDDED, name, tmp_path)
    with pytest.raises(UserInputError, match=f"the weights of {name} are missing from this installation"):
        load_pipeline(name)


def test_an_unreachable_hub_is_said(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert model_source("nobody/no-such-model") == "nobody/no-such-model"
    with pytest.raises(UserInputError, match=r"nobody/no-such-model is no local folder, and the .* hub does not"):
        load_pipeline("nobody/no-such-model")


def test_devices():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    for device, message in (("quantum", "device must be such as"), ("meta", "of type cpu, cuda or mps")):
        with pytest.raises(UserInputError, match=message):
            resolve_device(device)
    with pytest.raises(UserInputError, match="device must be present, got cuda:77"):
        resolve_device("cuda:77")


def test_dtypes():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (resolve_dtype(None, cpu), resolve_dtype(None, cuda)) == (torch.float32, torch.bfloat16)
    assert resolve_dtype("fp16", cpu) == resolve_dtype(torch.float16, cpu) == torch.float16
    for dtype in ("float8", torch.int8):
        with pytest.raises(UserInputError, match="dtype must be one of float32, bfloat16, float16"):
            resolve_dtype(dtype, cpu)


def test_the_digest_knows_weights_and_configuration(folder):
    first, second = load_pipeline(str(folder)), load_pipeline(str(folder))
    digest = weights_digest(first)
    assert digest == weights_digest(second)
    with torch.no_grad():
        second.vae.post_quant_conv.weight[0] += 1e-4
    assert weights_digest(second) != digest
    first.scheduler.register_to_config(shift=5.0)
    assert weights_digest(first) != digest
