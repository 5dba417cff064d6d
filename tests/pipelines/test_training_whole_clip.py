"""The autoencoder on whole clips equals the stock one that walks through them; fused layers equal their reference."""

import os
import subprocess
import sys

import pytest
import torch

from diffsieve.pipelines.training.models import build_vae
from diffsieve.pipelines.training.norm_silu import norm_silu_pad, norm_silu_pad_reference
from diffsieve.pipelines.training.whole_clip import decode_clip, encode_clip
from tests.tiny_training import tiny_settings

SIZES = [(1, 32, 32), (5, 32, 48), (9, 16, 32)]
SHAPES = [(1, 16, 1, 3, 5), (2, 8, 3, 4, 5), (1, 32, 2, 8, 9)]


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    vae = build_vae(tiny_settings().model).eval()
    with torch.no_grad():  # away from the plain start values
        for parameter in vae.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return vae


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@torch.no_grad()
def test_encoding_a_whole_clip_equals_the_stock_encoder(vae, generator, size):
    video = torch.rand(2, 3, *size, generator=generator) * 2 - 1
    stock = vae.encode(video).latent_dist
    mean, log_variance = encode_clip(vae, video)
    # the same sums in another order: rounding of float32 in values of a few units
    torch.testing.assert_close(mean, stock.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_variance, stock.logvar, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@torch.no_grad()
def test_decoding_a_whole_clip_equals_the_stock_decoder(vae, generator, size):
    frames, height, width = size
    latents = torch.randn(2, 4, (frames - 1) // 4 + 1, height // 8, width // 8, generator=generator)
    stock = vae.decode(latents).sample
    ours = decode_clip(vae, latents)
    assert ours.shape == (2, 3, *size)
    torch.testing.assert_close(ours.clamp(-1, 1), stock, rtol=1e-4, atol=1e-4)


def test_the_layers_of_the_fused_path_equal_the_stock_path(vae, generator, monkeypatch):
    monkeypatch.setattr("diffsieve.pipelines.training.whole_clip.norm_silu_pad", norm_silu_pad_reference)
    video = torch.rand(1, 3, 5, 32, 32, generator=generator) * 2 - 1
    plain = encode_clip(vae, video)[0]
    fused = encode_clip(vae, video, fused=True)[0]
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decode_clip(vae, plain, fused=True), decode_clip(vae, plain), rtol=1e-4, atol=1e-4)


def test_the_reference_of_the_fused_layer_is_the_stock_norm(vae, generator):
    norm = vae.decoder.norm_out
    x = torch.randn(2, norm.gamma.numel(), 3, 4, 5, generator=generator)
    out = norm_silu_pad_reference(x, norm.gamma.flatten(), 2)
    assert not out[:, :, :2].any()
    torch.testing.assert_close(out[:, :, 2:], torch.nn.functional.silu(norm(x)), rtol=1e-5, atol=1e-5)


def compare_with_reference(device: str) -> None:
    """Output and gradients of the fused layer against the reference in float64 (of the same float32 input)."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        for pad in (0, 2):
            x = torch.randn(shape, generator=generator).to(device).requires_grad_()
            gamma = (1 + torch.randn(shape[1], generator=generator)).to(device).requires_grad_()
            out = norm_silu_pad(x, gamma, pad)
            weights = torch.randn(out.shape, generator=generator).to(device)
            got = (out, *torch.autograd.grad((out * weights).sum(), (x, gamma)))
            expected_out = norm_silu_pad_reference(x, gamma, pad)
            expected = (expected_out, *torch.autograd.grad((expected_out * weights).sum(), (x, gamma)))
            for name, ours, reference in zip(("out", "x", "gamma"), got, expected, strict=True):
                assert torch.isfinite(ours).all(), (name, shape, pad)
                error = (ours - reference).norm() / reference.norm()
                # both round in float32; sums over at most a few hundred values
                assert error < 1e-5, (name, shape, pad, float(error))


@pytest.mark.slow
def test_the_fused_kernel_equals_its_reference_in_the_interpreter():
    code = "import tests.pipelines.test_training_whole_clip as test; test.compare_with_reference('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    pytest.importorskip("triton", reason="Triton has no build for this system")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_the_fused_kernel_equals_its_reference_on_a_gpu():
    compare_with_reference("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["compile", "triton"])
def test_a_fused_autoencoder_equals_the_plain_one_on_a_gpu(vae, generator, fusion):
    import copy

    from diffsieve.pipelines.training.vae_stage import compile_res_blocks, use_channels_last

    plain = copy.deepcopy(vae).cuda()
    fused = copy.deepcopy(plain)
    use_channels_last(fused)
    if fusion == "compile":
        compile_res_blocks(fused)
    video = (torch.rand(2, 3, 5, 32, 32, generator=generator) * 2 - 1).cuda()
    results = []
    for network, flag in ((plain, False), (fused, fusion == "triton")):
        with torch.backends.cudnn.flags(allow_tf32=False):
            output = decode_clip(network, encode_clip(network, video, fused=flag)[0], fused=flag)
            output.square().mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        results.append((output.detach(), gradients))
    for ours, reference in zip(results[1], results[0], strict=True):
        # float32 in another order, over thirty layers
        assert (ours - reference).norm() / reference.norm() < 1e-3
