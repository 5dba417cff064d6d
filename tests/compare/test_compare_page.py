"""LPIPS of a comparison: a loaded network, or the reason why there is none."""

import torch
from safetensors.torch import save_file

from diffsieve.compare.compare_page import load_lpips_or_say_why
from diffsieve.eval import LoadedLpips, MetricResult
from diffsieve.eval.lpips_net import Lpips
from diffsieve.eval.weights import converted_lpips


def test_random_backbone_weights_in_the_cache_are_used_and_missing_ones_told(no_weights):
    missing = load_lpips_or_say_why(torch.device("cpu"))
    assert isinstance(missing, MetricResult)
    assert missing.name == "lpips[alex]"
    assert "diffsieve weights lpips" in missing.reason
    converted_lpips("alex").parent.mkdir(parents=True)
    save_file(Lpips("alex").state_dict(), converted_lpips("alex"))
    assert isinstance(load_lpips_or_say_why(torch.device("cpu")), LoadedLpips)
