"""PixelDiTPipeline: the call, noise by picture size, guidance, saving and loading, bad input."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from diffsieve import PixelDiTPipeline, PixelDiTTransformer2DModel, UserInputError, load_pipeline
from diffsieve.pipelines.pixel_dit import noise_scale
from tests import tiny_pixels
from tests.tiny_pixels import generate


def test_noise_scale_by_size():
    sizes = [(32, 32), (64, 64), (128, 128), (64, 256), (256, 256), (512, 512)]
    assert [noise_scale(*size) for size in sizes] == [1, 1, 2, 2, 4, 8]


def test_averaged_noise_of_a_large_picture_is_that_of_a_small_one():
    noise = torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(0)) * noise_scale(256, 256)
    assert torch.nn.functional.avg_pool2d(noise, 4).std() == pytest.approx(1, rel=0.02)


def test_the_call_is_euler_on_the_velocity():
    """20 steps by hand: sigmas from 1 to 0.001 in equal steps, then 0; noise twice as wide at 128 x 128."""
    pipe = tiny_pixels.pipeline()
    noise = torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(3))
    x = 2 * noise
    sigmas = [*torch.linspace(1, 0.001, 3, dtype=torch.float64).tolist(), 0]
    with torch.no_grad():
        for now, following in itertools.pairwise(sigmas):
            timestep = torch.tensor([1000 * now])
            x = x + (following - now) * pipe.transformer(x, timestep, torch.tensor([1])).sample
    images = pipe("food & drink", 128, 128, num_inference_steps=3, latents=noise, output_type="pt").images
    torch.testing.assert_close(images, (x / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-4)


def test_classes_by_name_and_number_and_images_of_each():
    pipe = tiny_pixels.pipeline()
    noise = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    by_name = generate(pipe, ["Objects", "food & drink"], latents=noise, num_images=2)
    by_number = generate(pipe, [2, 2, 1, 1], latents=noise)
    assert torch.equal(by_name, by_number)
    assert not torch.allclose(by_name, generate(pipe, [0, 0, 0, 0], latents=noise), atol=1e-4)


def test_a_picture_does_not_depend_on_its_neighbours():
    pipe = tiny_pixels.pipeline()
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    pair = generate(pipe, [0, 1], generator=generators)
    alone = generate(pipe, 1, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(pair[1:], alone, rtol=1e-4, atol=1e-5)


def test_guidance_moves_away_from_no_class():
    pipe = tiny_pixels.pipeline()
    noise = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def velocity(label):
        with torch.no_grad():
            return pipe.transformer(noise, torch.tensor([1000.0]), label).sample

    cond, uncond = velocity(torch.tensor([2])), velocity(None)
    images = generate(pipe, 2, latents=noise, guidance_scale=3.0, num_inference_steps=1)
    expected = noise - (uncond + 3 * (cond - uncond))
    torch.testing.assert_close(images, (expected / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-4)


def test_guidance_inside_its_interval_alone():
    pipe = tiny_pixels.pipeline()
    calls = []
    pipe.transformer.register_forward_pre_hook(lambda module, args: calls.append(args[2].tolist()))
    generate(pipe, 2, guidance_scale=2.0, num_inference_steps=5, guidance_interval=(0.2, 0.6))
    # sigmas 1, 0.75, 0.5, 0.25, 0.001
    assert calls == [[2], [2], [2], [3], [2], [3], [2]]


def test_the_pipeline_keeps_its_own_guidance(tmp_path):
    transformer = tiny_pixels.transformer()
    pipe = PixelDiTPipeline(
        transformer, FlowMatchEulerDiscreteScheduler(), guidance_scale=3.0, guidance_interval=(0.4, 1.0)
    )
    expected = generate(tiny_pixels.pipeline(), 1, guidance_scale=3.0, guidance_interval=[0.4, 1.0])
    assert torch.equal(generate(pipe, 1), expected)
    pipe.save_pretrained(tmp_path)
    assert torch.equal(generate(PixelDiTPipeline.from_pretrained(tmp_path), 1), expected)
    assert torch.equal(generate(pipe, 1, guidance_scale=1.0), generate(tiny_pixels.pipeline(), 1))


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (24, 16)])
def test_other_sizes(size):
    images = generate(tiny_pixels.pipeline(), height=size[0], width=size[1])
    assert images.shape == (1, 3, *size)
    assert 0 <= images.min() <= images.max() <= 1


def test_output_types():
    pipe = tiny_pixels.pipeline()
    tensor = generate(pipe)
    array = generate(pipe, output_type="np")
    picture = generate(pipe, output_type="pil")[0]
    assert array.shape == (1, 16, 16, 3)
    assert torch.equal(torch.from_numpy(array).permute(0, 3, 1, 2), tensor)
    assert picture.size == (16, 16)
    assert picture.mode == "RGB"
    assert isinstance(pipe(0, num_inference_steps=1, return_dict=False), tuple)


def test_callbacks_see_and_change_the_latents_and_may_stop():
    pipe = tiny_pixels.pipeline()
    steps = []

    def callback(pipe, step, timestep, tensors):
        steps.append((step, timestep))
        pipe._interrupt = step == 1
        return {"latents": torch.zeros_like(tensors["latents"])}

    images = generate(pipe, num_inference_steps=4, callback_on_step_end=callback)
    assert [step for step, _ in steps] == [0, 1]
    assert steps[0][1] == 1000
    assert torch.equal(images, torch.full_like(images, 0.5))


def test_the_cache_context_knows_the_step():
    pipe = tiny_pixels.pipeline()
    seen = []
    original = pipe.transformer.cache_context
    pipe.transformer.cache_context = lambda name, **kw: (seen.append((name, kw["step_index"])), original(name, **kw))[1]
    generate(pipe, guidance_scale=2.0)
    assert seen == [("cond", 0), ("uncond", 0), ("cond", 1), ("uncond", 1)]


def test_a_model_without_classes():
    pipe = tiny_pixels.pipeline(num_classes=0)
    assert generate(pipe, None, num_images=3).shape[0] == 3
    with pytest.raises(UserInputError, match="class_labels must be None for a model without classes"):
        pipe("objects")


def test_the_folder_round_trip_is_bit_identical(tmp_path):
    pipe = tiny_pixels.pipeline(topk=(3, 2), levels=2, rope_extent=16)
    expected = generate(pipe)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffsieve.pipelines.pixel_dit", "PixelDiTTransformer2DModel"]
    assert index["class_names"] == tiny_pixels.CLASSES
    loaded = PixelDiTPipeline.from_pretrained(tmp_path)
    assert dict(loaded.transformer.config).items() >= {"topk": [3, 2], "levels": 2, "rope_extent": 16}.items()
    assert torch.equal(generate(loaded), expected)
    assert torch.equal(generate(PixelDiTPipeline.from_pretrained(tmp_path, dtype=torch.float32)), expected)
    assert torch.equal(generate(load_pipeline(str(tmp_path), device="cpu")), expected)
    single = PixelDiTTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    assert all(torch.equal(a, b) for a, b in zip(single.parameters(), pipe.transformer.parameters(), strict=True))


def test_a_fresh_process_loads_with_the_class_alone(tmp_path):
    tiny_pixels.pipeline().save_pretrained(tmp_path)
    script = (
        "import sys, torch\nfrom diffsieve import PixelDiTPipeline\n"
        "pipe = PixelDiTPipeline.from_pretrained(sys.argv[1])\n"
        "noise = torch.Generator().manual_seed(0)\n"
        "print(pipe(0, num_inference_steps=1, output_type='pt', generator=noise).images.sum())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    expected = generate(tiny_pixels.pipeline(), 0, num_inference_steps=1).sum()
    assert done.stdout.strip() == str(expected)


def test_bfloat16_weights_and_half_the_bytes(tmp_path):
    pipe = tiny_pixels.pipeline().to(torch.bfloat16)
    assert generate(pipe).isfinite().all()
    pipe.save_pretrained(tmp_path)
    loaded = PixelDiTPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(generate(loaded), generate(pipe))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 0}, r"height must be a whole number of pixels in \[1, 4096\], got 0"),
        ({"width": 16.5}, "width must be a whole number of pixels in .*, got 16.5"),
        ({"height": 5000}, "height must be .*, got 5000"),
        ({"class_labels": "dinosaurs"}, "class_labels must be in .* or one of 'Animals & Nature', .*, got 'dinosaurs'"),
        ({"class_labels": 3}, r"class_labels must be in \[0, 2\]"),
        ({"class_labels": [0, True]}, "got True"),
        ({"class_labels": []}, "class_labels must name at least one class, got none"),
        ({"num_inference_steps": 0}, "num_inference_steps must be a positive integer, got 0"),
        ({"num_images": 0}, "num_images must be a positive integer, got 0"),
        ({"output_type": "jpeg"}, "output_type must be one of pil, np, pt, got 'jpeg'"),
        ({"latents": torch.zeros(1, 3, 8, 8)}, r"latents must have shape \(1, 3, 16, 16\), got \(1, 3, 8, 8\)"),
        ({"generator": [torch.Generator()] * 2}, "generator must hold one for each of the 1 pictures, got 2"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "must be among 'latents', got 'noise'"),
        ({"guidance_interval": (0.5, 0.1)}, r"guidance_interval must be two shares of noise .*, got \(0.5, 0.1\)"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(UserInputError, match=message):
        tiny_pixels.pipeline()(**({"class_labels": 0} | options))


def test_names_must_fit_the_classes():
    with pytest.raises(UserInputError, match="class_names must name the 3 classes of the transformer, got 1 names"):
        PixelDiTPipeline(tiny_pixels.transformer(), FlowMatchEulerDiscreteScheduler(), class_names=["one"])


def test_a_damaged_checkpoint_is_named(tmp_path):
    tiny_pixels.pipeline().save_pretrained(tmp_path)
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserInputError, match="cannot be loaded"):
        load_pipeline(str(tmp_path))


def test_weights_of_another_architecture_are_named(tmp_path):
    tiny_pixels.pipeline().save_pretrained(tmp_path)
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))
    with pytest.raises(UserInputError, match=r"model .* must have weights for every part, got none for transformer\."):
        load_pipeline(str(tmp_path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_head_dim": 32}))
    with pytest.raises(UserInputError, match="cannot be loaded"):
        load_pipeline(str(tmp_path))


def test_the_generic_class_loads_it_with_a_file_of_one_import(tmp_path):
    """The way that diffusers offers for classes of other packages."""
    tiny_pixels.pipeline().save_pretrained(tmp_path)
    (tmp_path / "pipeline.py").write_text("from diffsieve.pipelines.pixel_dit import PixelDiTPipeline\n")
    pipe = DiffusionPipeline.from_pretrained(tmp_path, custom_pipeline=str(tmp_path), trust_remote_code=True)
    assert type(pipe) is PixelDiTPipeline
