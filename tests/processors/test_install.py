"""Applying and removing: exactness, the pipeline methods, both transformers, bad input."""

import copy
import subprocess
import sys

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    FluxTransformer2DModel,
    ModularPipeline,
    WanPipeline,
    WanVideoToVideoPipeline,
)
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from diffsieve import (
    BAAttConfig,
    BAAttProcessor,
    UserInputError,
    apply_sparse_attention,
    remove_sparse_attention,
    sparsity_summary,
)
from diffsieve.processors import sparse_attention, supported_models
from diffsieve.processors.install import add_pipeline_methods
from tests import tiny

CONFIG = BAAttConfig(block_size=8, min_tokens=0, warmup_steps=1)


def _processors(pipe):
    models = (pipe.transformer, pipe.transformer_2)
    return [processor for model in models if model is not None for processor in model.attn_processors.values()]


def _traces(module):
    """Names of all instance attributes, registries of diffusers hooks and torch hooks below a module."""
    return {
        name: (sorted(child.__dict__), len(child._forward_pre_hooks), len(child._forward_hooks))
        for name, child in module.named_modules()
    }


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_remove_restores_everything(two):
    pipe = tiny.wan_pipeline(two=two)
    before = tiny.generate(pipe)
    processors, traces, config = _processors(pipe), _traces(pipe.transformer), dict(pipe.config)
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    assert not torch.equal(tiny.generate(pipe), before)
    remove_sparse_attention(pipe)
    assert all(a is b for a, b in zip(_processors(pipe), processors, strict=True))
    assert _traces(pipe.transformer) == traces
    assert dict(pipe.config) == config
    assert torch.equal(tiny.generate(pipe), before)
    remove_sparse_attention(pipe)  # a second time changes nothing
    with pytest.raises(UserInputError, match="not applied to this WanPipeline"):
        sparsity_summary(pipe)


def test_state_dict_and_saved_files_are_unchanged(tmp_path):
    pipe = tiny.wan_pipeline()
    names = list(pipe.transformer.state_dict())
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    out = tiny.generate(pipe)
    assert list(pipe.transformer.state_dict()) == names
    pipe.save_pretrained(tmp_path)
    loaded = WanPipeline.from_pretrained(tmp_path)
    assert type(loaded.transformer.blocks[1].attn1.processor) is WanAttnProcessor
    loaded.set_progress_bar_config(disable=True)
    loaded.set_attn_processor(BAAttProcessor(CONFIG))
    assert torch.equal(tiny.generate(loaded), out)


def test_apply_twice_replaces():
    pipe = tiny.wan_pipeline()
    originals = _processors(pipe)
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    apply_sparse_attention(pipe, BAAttConfig(preset="paper", block_size=8, min_tokens=0, warmup_steps=3))
    tiny.generate(pipe)
    assert sparsity_summary(pipe).steps_dense == 3
    assert len(pipe.transformer._forward_pre_hooks) == 1
    remove_sparse_attention(pipe)
    assert all(a is b for a, b in zip(_processors(pipe), originals, strict=True))


def test_each_layer_has_its_own_processor_and_both_transformers_are_reached():
    pipe = tiny.wan_pipeline(two=True)
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    ours = [p for p in _processors(pipe) if isinstance(p, BAAttProcessor)]
    assert len(ours) == len({id(p) for p in ours}) == 6


def test_a_missing_first_transformer_is_skipped():
    pipe = tiny.wan_pipeline(two=True)
    pipe.register_modules(transformer=None)
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    assert isinstance(pipe.transformer_2.blocks[0].attn1.processor, BAAttProcessor)


def test_context_manager_restores():
    pipe = tiny.wan_pipeline()
    before = tiny.generate(pipe)
    with sparse_attention(pipe, CONFIG):
        sparse = tiny.generate(pipe)
    assert not torch.equal(sparse, before)
    assert torch.equal(tiny.generate(pipe), before)

    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    with pytest.raises(RuntimeError, match="inside"), sparse_attention(pipe, BAAttConfig(preset="paper")):
        raise RuntimeError("inside")
    assert torch.equal(tiny.generate(pipe), sparse)  # what was applied before the block is applied again


def test_attention_backend_set_before_and_after_is_kept():
    pipe = tiny.wan_pipeline()
    native, math = AttentionBackendName("native"), AttentionBackendName("_native_math")
    with attention_backend("native"):  # set_attention_backend also changes the process: put it back afterwards
        pipe.transformer.set_attention_backend("_native_math")
        pipe.set_attn_processor(BAAttProcessor(CONFIG))
        processor = pipe.transformer.blocks[1].attn1.processor
        assert processor._attention_backend == math
        pipe.transformer.set_attention_backend("native")
        assert processor._attention_backend == native
        assert pipe.transformer.blocks[1].attn2.processor._attention_backend == native
        tiny.generate(pipe)
        remove_sparse_attention(pipe)
        assert pipe.transformer.blocks[1].attn1.processor._attention_backend == native
        pipe.transformer.reset_attention_backend()


def test_parallelism_is_refused():
    pipe = tiny.wan_pipeline()
    pipe.transformer._parallel_config = object()
    with pytest.raises(UserInputError, match="parallelism"):
        pipe.set_attn_processor(BAAttProcessor(CONFIG))
    assert type(pipe.transformer.blocks[0].attn1.processor) is WanAttnProcessor
    pipe.transformer._parallel_config = None
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    pipe.transformer._parallel_config = object()  # enabled afterwards
    with pytest.raises(UserInputError, match="parallelism"):
        tiny.generate(pipe)


def test_foreign_processors_pass_through():
    pipe = tiny.wan_pipeline(two=True)
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    foreign = WanAttnProcessor()
    pipe.set_attn_processor(foreign)
    assert all(processor is foreign for processor in _processors(pipe))
    assert not pipe.transformer._forward_pre_hooks
    table = {name: WanAttnProcessor() for name in pipe.transformer.attn_processors}
    size = len(table)
    pipe.set_attn_processor(table)
    assert len(table) == size  # the models empty the dict that they get
    assert pipe.transformer_2.blocks[0].attn1.processor is table["blocks.0.attn1.processor"]


def test_processor_set_directly_on_the_transformer_is_replaced():
    pipe = tiny.wan_pipeline()
    dense = tiny.generate(pipe)
    pipe.transformer.set_attn_processor(BAAttProcessor())
    apply_sparse_attention(pipe, CONFIG)
    tiny.generate(pipe)
    remove_sparse_attention(pipe)
    assert torch.equal(tiny.generate(pipe), dense)


def test_a_processor_that_the_user_set_meanwhile_is_kept_on_removal():
    pipe = tiny.wan_pipeline()
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    mine = WanAttnProcessor()
    pipe.transformer.blocks[1].attn1.set_processor(mine)
    remove_sparse_attention(pipe)
    assert pipe.transformer.blocks[1].attn1.processor is mine


def test_pipelines_made_from_another_share_the_processors():
    pipe = tiny.wan_pipeline()
    pipe.set_attn_processor(BAAttProcessor(CONFIG))
    tiny.generate(pipe)
    other = WanVideoToVideoPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    tiny.generate(other, steps=4, strength=1.0)
    assert (other.sparsity_summary().steps_total, other.sparsity_summary().steps_dense) == (4, 1)


def test_methods_are_added_once_and_never_over_others(monkeypatch):
    for base in (DiffusionPipeline, ModularPipeline):
        assert callable(base.set_attn_processor)
        assert callable(base.sparsity_summary)

    def upstream(self, processor):
        return "upstream"

    monkeypatch.setattr(DiffusionPipeline, "set_attn_processor", upstream)
    add_pipeline_methods()
    assert DiffusionPipeline.set_attn_processor is upstream


def test_the_import_of_the_processor_adds_the_method():
    code = (
        "import sys, diffsieve\n"
        "from diffsieve.processors import BAAttConfig\n"
        "BAAttConfig(sparsity=0.75)\n"
        "assert 'diffusers' not in sys.modules, 'a config must not need diffusers'\n"
        "from diffsieve import BAAttProcessor\n"
        "from diffusers import WanPipeline\n"
        "assert WanPipeline.set_attn_processor.__module__ == 'diffsieve.processors.install'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pipeline_without_a_transformer():
    class Bare(DiffusionPipeline):
        def __init__(self, vae):
            super().__init__()
            self.register_modules(vae=vae)

    pipe = Bare(tiny.vae())
    for act in (pipe.set_attn_processor, lambda p: apply_sparse_attention(pipe, p)):
        with pytest.raises(UserInputError, match=r"got Bare, which has none; supported: WanTransformer3DModel"):
            act(BAAttProcessor())
    with pytest.raises(UserInputError, match="no component with set_attn_processor"):
        pipe.set_attn_processor(WanAttnProcessor())
    with pytest.raises(UserInputError, match="got str"):
        apply_sparse_attention("pipe", CONFIG)


def test_family_without_an_adapter():
    flux = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 4, 8)
    )
    with pytest.raises(UserInputError, match=r"FluxTransformer2DModel; supported: WanTransformer3DModel"):
        apply_sparse_attention(flux, CONFIG)
    with pytest.raises(UserInputError, match="AutoencoderKLWan"):
        apply_sparse_attention(tiny.vae(), CONFIG)
    assert AutoencoderKLWan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense_layers": (7,)}, r"dense_layers must name layers of the model \(3 layers\), got 7"),
        ({"dense_layers": (-4,)}, r"dense_layers .* got -4"),
        ({"record_masks": (3,)}, r"record_masks .* got 3"),
    ],
)
def test_layers_that_the_model_does_not_have(options, message):
    pipe = tiny.wan_pipeline()
    with pytest.raises(UserInputError, match=message):
        apply_sparse_attention(pipe, BAAttConfig(**options))
    assert type(pipe.transformer.blocks[0].attn1.processor) is WanAttnProcessor


def test_wrong_kind_of_config():
    with pytest.raises(UserInputError, match="got dict"):
        apply_sparse_attention(tiny.wan_pipeline(), {"sparsity": 0.5})


def test_negative_dense_layers_count_from_the_end():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=0, warmup_steps=1, dense_layers=(-1,)))
    tiny.generate(pipe)
    layers = pipe.sparsity_summary().layers
    assert [layers[f"transformer.blocks.{i}"] for i in range(3)] == [0.5, 0.5, 1.0]


def test_supported_models_table():
    row = supported_models()[0]
    assert row["family"] == "wan"
    assert row["transformers"] == "WanTransformer3DModel, WanVACETransformer3DModel"
    assert "WanPipeline" in row["pipelines"]


def test_a_deep_copy_runs_by_itself():
    pipe = tiny.wan_pipeline()
    dense = tiny.generate(pipe)
    apply_sparse_attention(pipe, CONFIG)
    sparse = tiny.generate(pipe)  # leaves its layers in sparse mode
    copied = copy.deepcopy(pipe)
    assert torch.equal(tiny.generate(copied, steps=4), tiny.generate(pipe, steps=4))
    assert sparsity_summary(copied).to_dict()["steps_dense"] == sparsity_summary(pipe).to_dict()["steps_dense"] == 1
    remove_sparse_attention(copied)
    assert torch.equal(tiny.generate(copied), dense)
    assert torch.equal(tiny.generate(pipe), sparse)


def test_a_deep_copy_of_the_transformer_leaves_the_original_alone():
    pipe, other = tiny.wan_pipeline(), tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=0, warmup_steps=2))
    sparse = tiny.generate(pipe)
    other.transformer = copy.deepcopy(pipe.transformer)
    assert torch.equal(tiny.generate(other), sparse)
    assert sparsity_summary(other).steps_dense == 2
    assert torch.equal(tiny.generate(pipe), sparse)


@pytest.mark.parametrize("processor", [BAAttProcessor, None], ids=["class", "none"])
def test_what_is_no_processor_is_refused_before_it_is_set(processor):
    pipe = tiny.wan_pipeline(layers=1)
    before = _processors(pipe)
    with pytest.raises(UserInputError, match="processor must be an attention processor or a dict of them, got "):
        pipe.set_attn_processor(processor)
    assert _processors(pipe) == before
