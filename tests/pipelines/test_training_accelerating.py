"""The accelerator of a training run makes its GPU the current one, with a launcher and without."""

from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType

from diffsieve.pipelines.training.accelerating import make_accelerator


@pytest.mark.parametrize(("device", "made_current"), [("cuda", []), ("cuda:1", [1]), ("cpu", [])])
def test_current_gpu(monkeypatch, device, made_current):
    found = SimpleNamespace(
        num_processes=1, mixed_precision="no", distributed_type=DistributedType.NO, device=torch.device(device)
    )
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: found)
    current = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)
    assert make_accelerator() is found
    assert current == made_current
