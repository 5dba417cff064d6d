"""What observers see is what the attention of diffusers gets, and they leave no trace."""

import pytest
import torch
from diffusers.models.transformers import transformer_wan

from diffsieve.errors import UserInputError
from diffsieve.processors import BAAttConfig, apply_sparse_attention, observe_attention
from tests.tiny import GRID, HEADS, TOKENS, generate, transformer, wan_pipeline


def test_an_observer_sees_the_very_tensors_that_attention_gets(monkeypatch):
    pipe, given, seen = wan_pipeline(), [], []
    dispatch = transformer_wan.dispatch_attention_fn

    def spy(query, key, value, **options):
        if query.shape[1] == key.shape[1] == TOKENS:  # not the cross-attention to 16 text tokens
            given.append((query, key, value))
        return dispatch(query, key, value, **options)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", spy)
    with observe_attention(pipe, seen.append):
        generate(pipe, steps=2)
    assert len(seen) == len(given) == 2 * 2 * 3  # steps, branches of guidance, layers
    for call, tensors in zip(seen, given, strict=True):
        assert call.query.shape == (1, HEADS, TOKENS, 12)
        for mine, theirs in zip((call.query, call.key, call.value), tensors, strict=True):
            assert torch.equal(mine.transpose(1, 2), theirs)
    assert [call.step for call in seen] == [0] * 6 + [1] * 6
    assert [call.call for call in seen] == [0, 0, 0, 1, 1, 1] * 2
    assert [call.layer for call in seen[:3]] == [f"transformer.blocks.{n}" for n in range(3)]
    assert {(call.num_steps, call.num_layers, call.grid_thw) for call in seen} == {(2, 3, GRID)}
    assert [call.number for call in seen[:3]] == [0, 1, 2]
    assert seen[0].sigma == pytest.approx(1.0)
    assert 0 < seen[-1].sigma < 1
    assert seen[-1].timestep == pytest.approx(1000 * seen[-1].sigma, rel=1e-4)


def test_observing_changes_nothing_and_leaves_nothing():
    pipe = wan_pipeline()
    processors, plain = dict(pipe.transformer.attn_processors), generate(pipe)
    with observe_attention(pipe, lambda call: None):
        watched = generate(pipe)
    assert torch.equal(watched, plain)
    assert pipe.transformer.attn_processors == processors
    assert not [name for name in pipe.transformer.__dict__ if "diffsieve" in name]
    assert torch.equal(generate(pipe), plain)
    apply_sparse_attention(pipe, BAAttConfig(min_tokens=0, block_size=8))
    generate(pipe)


def test_layers_and_steps_can_be_chosen():
    pipe, seen = wan_pipeline(), []
    with observe_attention(pipe, seen.append, layers=(-1,), steps=(1, 3)):
        generate(pipe, steps=4, guidance=1.0)
        generate(pipe, steps=4, guidance=1.0)
    assert [(call.layer, call.step, call.call) for call in seen] == [
        ("transformer.blocks.2", step, 0) for step in (1, 3, 1, 3)
    ]


def test_two_transformers_share_the_steps():
    pipe, seen = wan_pipeline(two=True), []
    with observe_attention(pipe, seen.append, layers=(0,)):
        generate(pipe, steps=4, guidance=1.0)
    assert [call.step for call in seen] == [0, 1, 2, 3]
    assert {call.layer for call in seen} == {"transformer.blocks.0", "transformer_2.blocks.0"}


def test_an_error_in_the_callback_restores_the_pipeline():
    pipe = wan_pipeline()
    processors = dict(pipe.transformer.attn_processors)

    def fail(call):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), observe_attention(pipe, fail):
        generate(pipe)
    assert pipe.transformer.attn_processors == processors


def test_refusals():
    pipe = wan_pipeline()
    with pytest.raises(UserInputError, match="layers must name layers"), observe_attention(pipe, print, layers=(7,)):
        pass
    apply_sparse_attention(pipe, BAAttConfig())
    with pytest.raises(UserInputError, match="must be dense"), observe_attention(pipe, print):
        pass
    with pytest.raises(UserInputError, match="supported"), observe_attention(torch.nn.Linear(2, 2), print):
        pass
    with observe_attention(transformer(), lambda call: None):
        pass
