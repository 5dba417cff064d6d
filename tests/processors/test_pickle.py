"""Models with sparse attention travel by pickle: `torch.save` of a module, arguments of other processes."""

import io
import pickle
import subprocess
import sys

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from diffsieve import (
    BAAttConfig,
    LLSAConfig,
    UserInputError,
    apply_sparse_attention,
    remove_sparse_attention,
    sparsity_summary,
)
from diffsieve.processors.timing import StageTimer
from tests import tiny

COUNTED = BAAttConfig(block_size=8, min_tokens=0, warmup_steps=2)
SHARE = BAAttConfig(block_size=8, min_tokens=0, warmup_steps=0.4)
LLSA = LLSAConfig(block_size=4, topk=1)

RUN_IT = """
import pickle, sys
from tests import tiny
from diffsieve import sparsity_summary
with open(sys.argv[1], "rb") as file:
    pipe = pickle.load(file)
tiny.generate(pipe)
print(sparsity_summary(pipe).density_overall)
"""


@pytest.mark.parametrize("config", [COUNTED, SHARE, LLSA], ids=["count", "share", "llsa"])
def test_a_pipeline_keeps_its_sparse_attention(config):
    pipe = tiny.wan_pipeline(two=True)
    dense = tiny.generate(pipe)
    apply_sparse_attention(pipe, config)
    sparse = tiny.generate(pipe)  # leaves counts, orders and a timer behind
    restored = pickle.loads(pickle.dumps(pipe))
    before = sparsity_summary(pipe).to_dict()
    assert sparsity_summary(restored).to_dict() == before
    assert torch.equal(tiny.generate(restored, guidance=1.0), tiny.generate(pipe, guidance=1.0))
    assert not torch.equal(sparse, dense)
    remove_sparse_attention(restored)
    assert torch.equal(tiny.generate(restored), dense)
    assert torch.equal(tiny.generate(pipe), sparse)


def test_a_saved_transformer_is_one_on_its_own():
    pipe, other = tiny.wan_pipeline(), tiny.wan_pipeline()
    apply_sparse_attention(pipe, COUNTED)
    sparse = tiny.generate(pipe)
    file, weights = io.BytesIO(), io.BytesIO()
    torch.save(pipe.transformer, file)
    torch.save(tiny.wan_pipeline().transformer, weights)
    assert file.tell() < weights.tell() + 100_000  # not the text encoder, nor the VAE
    file.seek(0)
    other.transformer = torch.load(file, weights_only=False)
    assert torch.equal(tiny.generate(other), sparse)
    assert sparsity_summary(other).steps_dense == 2
    assert torch.equal(tiny.generate(pipe), sparse)


def test_a_share_of_the_steps_needs_the_pipeline():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, SHARE)
    restored = pickle.loads(pickle.dumps(pipe.transformer))
    inputs = {
        "hidden_states": torch.zeros(1, 16, 3, 8, 8),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": torch.zeros(1, 4, 16),
    }
    with pytest.raises(UserInputError, match=r"write apply_sparse_attention\(pipe, config\) for the whole pipeline"):
        restored(**inputs)


def test_nothing_is_left_in_a_model_that_can_be_pickled():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, COUNTED)
    remove_sparse_attention(pipe)
    pickle.dumps(pipe.transformer)
    assert "forward" not in pipe.transformer.blocks.__dict__


def test_a_cache_beside_it_works_as_before():
    pipe = tiny.wan_pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    apply_sparse_attention(pipe, COUNTED)
    cached = tiny.generate(pipe)
    pipe.transformer.disable_cache()
    restored = pickle.loads(pickle.dumps(pipe))
    assert torch.equal(tiny.generate(restored), cached)


def test_a_timer_travels_with_its_seconds_but_not_its_events():
    class Event:
        def __reduce__(self):
            raise TypeError("an event belongs to its process")

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 250.0

    timer = StageTimer(torch.device("cpu"))
    timer._events.append(("attention", Event(), Event()))
    assert pickle.loads(pickle.dumps(timer)).seconds() == {"attention": 0.25}
    assert timer.seconds() == {"attention": 0.25}


@pytest.mark.slow
def test_another_process_can_run_it(tmp_path):
    pipe = tiny.wan_pipeline(layers=2)
    apply_sparse_attention(pipe, COUNTED)
    (tmp_path / "pipe").write_bytes(pickle.dumps(pipe))
    done = subprocess.run(
        [sys.executable, "-c", RUN_IT, str(tmp_path / "pipe")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tiny.generate(pipe)
    assert float(done.stdout) == sparsity_summary(pipe).density_overall
