"""The Fréchet distance by hand, its moments in a stream, its sample rule, and the features it is taken on."""

import math

import pytest
import skimage.data
import torch

from diffsieve.errors import UserInputError
from diffsieve.eval import (
    FeatureMoments,
    FeatureNetwork,
    MissingWeightsError,
    frechet,
    frechet_distance,
    load_features,
    open_clip,
)
from diffsieve.eval.features import _effnet, prepare

EYE = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)
TILTED = torch.tensor([[2.0, 1.0], [1.0, 2.0]])


def diagonal(*values: float) -> torch.Tensor:
    return torch.diag(torch.tensor(values))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param((ZERO, TILTED), (ZERO, TILTED), 0.0, id="equal"),
        pytest.param((ZERO, TILTED), (torch.tensor([3.0, 4.0]), TILTED), 25.0, id="shifted"),
        pytest.param((ZERO, TILTED), (ZERO, 4 * TILTED), 4.0, id="four-times"),
        pytest.param((ZERO, diagonal(1, 4)), (torch.tensor([1.0, 0.0]), diagonal(4, 1)), 3.0, id="diagonal"),
        pytest.param((ZERO, TILTED), (ZERO, EYE), 4 - 2 * math.sqrt(3), id="tilted"),
        pytest.param((ZERO, diagonal(1, 0)), (ZERO, diagonal(0, 1)), 2.0, id="singular"),
    ],
)
def test_the_distance_by_hand(first, second, expected):
    assert frechet_distance(*first, *second) == pytest.approx(expected, abs=1e-12)
    assert frechet_distance(*second, *first) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("sizes", [(50,), (1, 1, 48), (7, 0, 43)], ids=str)
def test_moments_of_a_stream_are_those_of_the_whole(sizes, generator):
    # A mean far from zero: sums of squares would lose half of the digits.
    features = 1e4 + torch.randn(50, 6, generator=generator, dtype=torch.float64)
    moments = FeatureMoments(6)
    for part in features.split(sizes):
        moments.update(part)
    assert moments.count == 50
    torch.testing.assert_close(moments.mean, features.mean(dim=0), rtol=1e-13, atol=0)
    torch.testing.assert_close(moments.covariance, torch.cov(features.T), rtol=0, atol=1e-10)


def test_moments_check_their_input():
    moments = FeatureMoments(3)
    with pytest.raises(UserInputError, match="shape \\(n, 3\\), got \\(2, 4\\)"):
        moments.update(torch.zeros(2, 4))
    with pytest.raises(UserInputError, match="finite"):
        moments.update(torch.full((2, 3), math.nan))
    with pytest.raises(UserInputError, match="at least 2 samples, got 0"):
        _ = moments.covariance


def mean_colour() -> FeatureNetwork:
    return FeatureNetwork("mean-colour", 3, lambda frames: frames.float().mean(dim=(2, 3)), "none")


def random_clips(count: int, frames: int, generator: torch.Generator) -> list:
    sizes = (frames, 3, 4, 4)
    return [open_clip(torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)) for _ in range(count)]


def test_the_distance_of_clips_tells_its_samples_and_its_floor(generator):
    dense, sparse = random_clips(4, 40, generator), random_clips(3, 40, generator)
    result = frechet(dense, sparse, mean_colour())
    assert (result.name, result.reference_samples, result.test_samples) == ("fd-frames[mean-colour]", 160, 120)
    features = [
        torch.cat([torch.stack(list(clip.frames())).double().mean(dim=(2, 3)) for clip in clips])
        for clips in (dense, sparse, dense[::2], dense[1::2])
    ]
    moments = [(f.mean(dim=0), torch.cov(f.T)) for f in features]
    assert result.value == pytest.approx(frechet_distance(*moments[0], *moments[1]), rel=1e-5)
    assert result.floor == pytest.approx(frechet_distance(*moments[2], *moments[3]), rel=1e-5)
    assert frechet(dense, dense, mean_colour()).value == pytest.approx(0, abs=1e-9)


def test_too_few_samples_give_no_number_but_a_reason(generator):
    result = frechet(random_clips(1, 5, generator), random_clips(1, 6, generator), mean_colour())
    assert result.value is None
    assert "at least 6 samples on each side, got 5 and 6" in result.reason
    enough = frechet(random_clips(1, 6, generator), random_clips(1, 6, generator), mean_colour())
    assert enough.value is not None
    assert enough.floor is None  # a half of six has too few


def test_missing_features_say_how_to_get_them(no_weights):
    with pytest.raises(MissingWeightsError, match="run `diffsieve weights effnet`"):
        load_features("effnet-lite0")
    with pytest.raises(MissingWeightsError, match="TorchScript file from you"):
        load_features("inception")
    with pytest.raises(UserInputError, match="name must be one of effnet-lite0, inception, got 'resnet'"):
        load_features("resnet")


def test_another_file_is_not_taken_for_the_weights(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"nonsense")
    with pytest.raises(UserInputError, match="SHA-256"):
        load_features("effnet-lite0", weights=tmp_path / "a.pth")


def test_random_weights_of_the_feature_network_are_mapped_by_order(tmp_path):
    import timm

    torch.manual_seed(0)
    source = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({f"other.{i}": value for i, value in enumerate(state.values())}, tmp_path / "a.pth")
    network = _effnet(tmp_path / "a.pth", torch.device("cpu"))
    frame = torch.from_numpy(skimage.data.coffee()).permute(2, 0, 1)[None]
    features = network.features_of(frame)
    assert features.shape == (1, network.dimensions)
    with torch.no_grad():
        expected = source.forward_head(source.forward_features(prepare(frame[0])[None]), pre_logits=True)
    torch.testing.assert_close(features, expected)
    torch.save({"one": torch.zeros(3)}, tmp_path / "b.pth")
    with pytest.raises(UserInputError, match="does not fit"):
        _effnet(tmp_path / "b.pth", torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "mean", "norm"),
    [
        ("coffee", 0.14151, 13.8307),
        ("chelsea", 0.12619, 15.4319),
        ("motorcycle", 0.15354, 11.7013),
        ("astronaut", 0.22997, 15.4291),
    ],
)
def test_known_answers_of_the_feature_network(name, mean, norm):
    try:
        network = load_features("effnet-lite0")
    except MissingWeightsError:
        pytest.skip("needs the weights of EfficientNet-Lite0; `diffsieve weights effnet` gets them")
    image = skimage.data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(skimage.data, name)()
    features = network.features_of(torch.from_numpy(image).permute(2, 0, 1)[None])
    assert features.mean().item() == pytest.approx(mean, rel=1e-3)
    assert features.norm().item() == pytest.approx(norm, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_torchscript_file_of_the_user_gives_the_features(tmp_path):
    class Features(torch.nn.Module):
        def forward(self, frames: torch.Tensor, return_features: bool = False) -> torch.Tensor:
            return frames.float().mean(dim=(2, 3)).repeat(1, 683)[:, :2048]

    torch.jit.script(Features()).save(str(tmp_path / "a.pt"))
    network = load_features("inception", weights=tmp_path / "a.pt")
    assert network.features_of(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape == (2, 2048)
    (tmp_path / "b.pt").write_bytes(b"nonsense")
    with pytest.raises(UserInputError, match="TorchScript"):
        load_features("inception", weights=tmp_path / "b.pt")
