"""The emoji set from package archives, and the command that makes it."""

import io
import json
import tarfile

import pytest
from PIL import Image
from typer.testing import CliRunner

from diffsieve import UserInputError
from diffsieve.cli import app
from diffsieve.pipelines.training import npm
from diffsieve.pipelines.training.npm import Package, check_archive, fetch_package, read_members
from diffsieve.pipelines.training.pixel_dit.emoji import build_emoji, read_names

TABLE = [
    {"unified": "1F34E", "non_qualified": None, "name": "RED APPLE", "category": "Food & Drink"},
    {"unified": "2764-FE0F", "non_qualified": "2764", "name": "HEAVY BLACK HEART", "category": "Symbols"},
    {"unified": "1F44B", "name": "WAVING HAND SIGN", "category": "People & Body", "skin_variations": {"1F3FB": {}}},
    {"unified": "1F595", "name": "RAISED MIDDLE FINGER", "category": "People & Body"},
    {"unified": "1F3FB", "name": "SKIN TONE", "category": "Component"},
]
PICTURES = ["1f34e", "2764", "1f44b", "1f44b-1f3fb", "1f595", "1f3fb", "e0e6"]


def picture():
    stream = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(stream, "WEBP", lossless=True)
    return stream.getvalue()


def archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def archives(tmp_path):
    pictures = {f"package/assets/{code}.webp": picture() for code in PICTURES} | {"package/README.md": b"text"}
    table = {"package/emoji.json": json.dumps(TABLE).encode(), "package/img/1f34e.png": b"not read"}
    return archive(tmp_path / "pictures.tgz", pictures), archive(tmp_path / "names.tgz", table)


def test_pictures_by_category_without_skin_tones_and_the_rude_gesture(tmp_path, archives):
    built = build_emoji(*archives, tmp_path / "set", check=False)
    files = sorted(path.relative_to(tmp_path / "set").as_posix() for path in (tmp_path / "set").rglob("*.webp"))
    assert files == [
        "Food & Drink/1f34e-red-apple.webp",
        "People & Body/1f44b-waving-hand-sign.webp",
        "Symbols/2764-heavy-black-heart.webp",
    ]
    assert built.counts == {"Food & Drink": 1, "People & Body": 1, "Symbols": 1}
    assert built.unknown == 1  # e0e6
    assert (tmp_path / "set" / files[0]).read_bytes() == picture()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["names.tgz", "pictures.tgz", "set"]


def test_a_folder_in_use_is_refused(tmp_path, archives):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("x")
    with pytest.raises(UserInputError, match="out must be a new or empty folder"):
        build_emoji(*archives, tmp_path / "set", check=False)
    assert (tmp_path / "set" / "mine.txt").exists()


def test_other_archives_are_refused(tmp_path, archives):
    with pytest.raises(UserInputError, match="must have sha256 c1bb7e"):
        build_emoji(*archives, tmp_path / "set")
    with pytest.raises(UserInputError, match=r"must hold package/emoji\.json"):
        build_emoji(archives[0], archives[0], tmp_path / "set", check=False)
    with pytest.raises(UserInputError, match="must hold pictures of the emoji"):
        build_emoji(archives[1], archives[1], tmp_path / "set", check=False)
    with pytest.raises(UserInputError, match=r"is missing; run `npm pack @lobehub"):
        check_archive(tmp_path / "none.tgz", npm.FLUENT_3D.sha256, npm.FLUENT_3D.command)
    assert not (tmp_path / "set").exists()
    assert not (tmp_path / ".set.part").exists()


@pytest.mark.parametrize("table", [b"[", b"{}1", b'["text"]', b'[{"unified": "1F34E"}]'])
def test_a_damaged_table_is_named(table):
    with pytest.raises(UserInputError, match=r"emoji\.json must list emoji"):
        read_names(table)


def test_archives_are_read_with_care(tmp_path):
    bad = archive(tmp_path / "bad.tgz", {"package/../../evil.webp": b"x"})
    with pytest.raises(UserInputError, match="must hold plain files inside it"):
        read_members(bad, lambda path: True, 10)
    large = archive(tmp_path / "large.tgz", {"package/a": b"12345678901"})
    with pytest.raises(UserInputError, match="package/a must have at most 10 bytes, got 11"):
        read_members(large, lambda path: True, 10)
    (tmp_path / "cut.tgz").write_bytes(large.read_bytes()[:40])
    with pytest.raises(UserInputError, match=r"must be a \.tgz archive"):
        read_members(tmp_path / "cut.tgz", lambda path: True, 10)


def test_a_missing_package_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(npm.shutil, "which", lambda name: None)
    package = Package("some-emoji@1.0.0", "some-emoji-1.0.0.tgz", "0")
    with pytest.raises(UserInputError, match=r"npm is not installed; run `npm pack some-emoji@1.0.0`"):
        fetch_package(package, tmp_path)
    (tmp_path / package.file).write_bytes(b"")
    assert fetch_package(package, tmp_path) == tmp_path / package.file


def test_the_command(tmp_path, archives, monkeypatch):
    from diffsieve.pipelines.training.pixel_dit import emoji

    monkeypatch.setattr(emoji, "check_archive", lambda *arguments: None)
    folder = tmp_path / "npm"
    folder.mkdir()
    for path, package in zip(archives, (npm.FLUENT_3D, npm.EMOJI_NAMES), strict=True):
        path.rename(folder / package.file)
    command = ["data", "emoji", "--out", str(tmp_path / "set"), "--packages", str(folder), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["pictures"] == 3
    assert json.loads(done.stdout)["categories"]["Symbols"] == 1
