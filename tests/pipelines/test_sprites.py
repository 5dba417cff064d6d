import functools
import hashlib
import io
import json
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve.cli import main
from diffsieve.errors import UserInputError
from diffsieve.pipelines.training import sprites as sprites_module
from diffsieve.pipelines.training.captions import COLOURS
from diffsieve.pipelines.training.npm import FLUENT_3D, fetch_package
from diffsieve.pipelines.training.sprites import (
    Sprites,
    build_sprites,
    load_sprites,
    load_subjects,
)

SUBJECTS = {"block": "1f7e5", "bar": "1f7e6"}
RED, BLUE = (200, 40, 40, 255), (30, 60, 220, 255)


def encode(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="WEBP", lossless=True, exact=True)
    return file.getvalue()


def picture(colour: tuple[int, ...], box: tuple[int, int, int, int]) -> bytes:
    """A 256 px picture: white and invisible, with a filled box (top, left, bottom, right)."""
    pixels = np.full((256, 256, 4), (255, 255, 255, 0), dtype=np.uint8)
    top, left, bottom, right = box
    pixels[top:bottom, left:right] = colour
    return encode(pixels)


def pictures() -> dict[str, bytes]:
    return {
        "package/package.json": b"{}",
        "package/assets/1f7e5.webp": picture(RED, (60, 100, 160, 200)),
        "package/assets/1f7e6.webp": picture(BLUE, (20, 10, 120, 210)),
        "package/assets/ffff.webp": b"no picture, but nobody asks for it",
    }


def pack(path: Path, members: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return path


@pytest.fixture
def archive(tmp_path):
    return pack(tmp_path / "package.tgz", pictures())


def build(archive: Path, out: Path, **options) -> Sprites:
    return build_sprites(archive, out, **{"subjects": SUBJECTS, "sha256": None, "sprite_px": 32, **options})


def test_a_picture_is_cropped_and_fills_the_square(archive, tmp_path):
    built = build(archive, tmp_path / "sprites.npz")
    assert built.names == ("block", "bar")
    block, bar = built.rgba
    # A 100 x 100 box fills the square, a 100 x 200 box fills the middle half of the rows.
    assert (block[3] == 1).all()
    assert (bar[3, 8:24] == 1).all()
    assert (bar[3, :7] == 0).all()
    assert (bar[3, 25:] == 0).all()
    torch.testing.assert_close(block[:3, 16, 16] * 255, torch.tensor(RED[:3]).float(), atol=0.5, rtol=0)


def test_invisible_white_does_not_bleed_into_the_edge(tmp_path):
    # A disc over invisible white: a resize before premultiplying would lighten its rim.
    y, x = np.mgrid[:256, :256]
    pixels = np.full((256, 256, 4), (255, 255, 255, 0), dtype=np.uint8)
    pixels[np.hypot(x - 128, y - 128) < 90] = (0, 0, 0, 255)
    archive = pack(tmp_path / "package.tgz", {"package/assets/1.webp": encode(pixels)})
    disc = build(archive, tmp_path / "sprites.npz", subjects={"disc": "1"}).rgba[0]
    assert ((disc[3] > 0.1) & (disc[3] < 0.9)).any()
    assert disc[:3].max() == 0


def test_the_file_holds_what_was_built(archive, tmp_path):
    built = build(archive, tmp_path / "a.npz")
    loaded = load_sprites(tmp_path / "a.npz")
    assert loaded.names == built.names
    assert torch.equal(loaded.rgba, built.rgba)
    assert loaded.rgba[:, :3].le(loaded.rgba[:, 3:] + 1e-6).all()  # premultiplied
    build(archive, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_progress_counts_the_subjects(archive, tmp_path):
    calls = []
    build(archive, tmp_path / "sprites.npz", progress=lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]


def test_the_checksum_is_compared(archive, tmp_path):
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    build(archive, tmp_path / "sprites.npz", sha256=right)
    with pytest.raises(UserInputError, match=f"must have sha256 0000, got {right}"):
        build(archive, tmp_path / "other.npz", sha256="0000")
    assert not (tmp_path / "other.npz").exists()


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("members", "extra"),
    [
        pytest.param({"../evil": b""}, (), id="parent"),
        pytest.param({"package/assets/../../../evil": b""}, (), id="parent-inside"),
        pytest.param({"/tmp/evil": b""}, (), id="absolute"),
        pytest.param({}, (link("package/assets/1f7e5.webp", "/etc/passwd", tarfile.SYMTYPE),), id="symlink"),
        pytest.param({}, (link("package/assets/1f7e5.webp", "../evil", tarfile.LNKTYPE),), id="hardlink"),
        pytest.param({}, (link("package/assets/1f7e5.webp", "", tarfile.FIFOTYPE),), id="fifo"),
    ],
)
def test_paths_that_lead_out_of_the_archive_are_refused(tmp_path, members, extra):
    archive = pack(tmp_path / "package.tgz", pictures() | members, *extra)
    with pytest.raises(UserInputError, match="must hold plain files inside it, got"):
        build(archive, tmp_path / "out" / "sprites.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package.tgz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"package/assets/1f7e6.webp": None}, r"lacks bar \(1f7e6\)", id="missing"),
        pytest.param(
            {"package/assets/1f7e6.webp": b"RIFF"}, "picture of subject 'bar' cannot be decoded", id="damaged"
        ),
        pytest.param(
            {"package/assets/1f7e6.webp": picture((0, 0, 0, 0), (0, 0, 256, 256))},
            "picture of subject 'bar' must not be empty",
            id="empty",
        ),
        pytest.param({"package/assets/1f7e6.webp": bytes(2**20 + 1)}, "must have at most 1048576 bytes", id="huge"),
    ],
)
def test_a_bad_picture_is_named(tmp_path, change, message):
    members = {name: content for name, content in (pictures() | change).items() if content is not None}
    with pytest.raises(UserInputError, match=message):
        build(pack(tmp_path / "package.tgz", members), tmp_path / "sprites.npz")
    assert not (tmp_path / "sprites.npz").exists()


def test_a_bad_archive_is_named(archive, tmp_path):
    with pytest.raises(UserInputError, match=r"none\.tgz is missing"):
        build(tmp_path / "none.tgz", tmp_path / "sprites.npz")
    for content in (b"plain text", archive.read_bytes()[:200]):
        (tmp_path / "broken.tgz").write_bytes(content)
        with pytest.raises(UserInputError, match=r"broken\.tgz must be a \.tgz archive"):
            build(tmp_path / "broken.tgz", tmp_path / "sprites.npz")


def test_an_unwritable_output_is_named_and_leaves_nothing(archive, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="out must be a writable file path"):
        build(archive, tmp_path / "file" / "sprites.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserInputError, match="out must be a writable file path"):
        build(archive, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "package.tgz"]


def test_a_sprite_file_that_is_missing_or_damaged_is_named(archive, tmp_path):
    path = tmp_path / "sprites.npz"
    with pytest.raises(UserInputError, match=r"sprites\.npz is missing; make it with `diffsieve data sprites"):
        load_sprites(path)
    build(archive, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    np.savez(tmp_path / "foreign.npz", other=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", rgba_dx=np.zeros((1, 4, 8, 8), np.uint8), names=np.array([{}], dtype=object))
    for content in (
        b"",
        b"plain text",
        whole[: len(whole) // 2],
        bytes(flipped),
        (tmp_path / "foreign.npz").read_bytes(),
        (tmp_path / "pickled.npz").read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(UserInputError, match=r"sprites\.npz must be a sprite file"):
            load_sprites(path)


def fake_npm(folder: Path, script: str) -> None:
    folder.mkdir()
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)


def test_the_package_is_fetched_when_it_is_missing(tmp_path, monkeypatch):
    fake_npm(tmp_path / "bin", f'echo "$@" > {FLUENT_3D.file}')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    archive = fetch_package(FLUENT_3D, tmp_path / "npm")
    assert archive.read_text() == f"pack --ignore-scripts {FLUENT_3D.name}\n"
    (tmp_path / "bin" / "npm").unlink()
    assert fetch_package(FLUENT_3D, tmp_path / "npm") == archive  # found, not fetched again


def test_without_npm_the_command_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserInputError, match=f"npm is not installed; run `{FLUENT_3D.command}`"):
        fetch_package(FLUENT_3D, tmp_path / "npm")
    assert not (tmp_path / "npm").exists()


def test_a_failure_of_npm_is_told(tmp_path, monkeypatch):
    fake_npm(tmp_path / "bin", "echo first >&2; echo no network >&2; exit 3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserInputError, match=r"failed with exit code 3: no network"):
        fetch_package(FLUENT_3D, tmp_path / "npm")


def test_sprites_are_validated():
    rgba = torch.zeros(2, 4, 8, 8)
    with pytest.raises(UserInputError, match=r"rgba must have shape \(S, 4, P, P\), got \(2, 3, 8, 8\)"):
        Sprites(rgba[:, :3], ("a", "b"))
    with pytest.raises(UserInputError, match=r"names must have one entry per sprite \(2\), got 1"):
        Sprites(rgba, ("a",))
    with pytest.raises(UserInputError, match="names must differ"):
        Sprites(rgba, ("a", "a"))
    with pytest.raises(UserInputError, match="subject must be one of the 2 sprite names, got 'c'"):
        Sprites(rgba, ("a", "b")).index("c")


def test_the_subject_list():
    subjects = load_subjects()
    assert len(subjects) >= 140
    assert len(set(subjects.values())) == len(subjects)
    for name in subjects:
        assert name.replace(" ", "").isalpha()
        assert name == name.lower()
        # A colour in a subject's name would contradict the background's colour word.
        assert not set(name.split()) & {*COLOURS, "orange", "white", "black"}


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "sprites", *words])
    return exit_info.value.code


def test_the_command_writes_the_file_and_tells_its_size(archive, tmp_path, monkeypatch, capsys):
    tiny = functools.partial(build_sprites, subjects=SUBJECTS, sha256=None, sprite_px=32)
    monkeypatch.setattr(sprites_module, "build_sprites", tiny)
    archive.rename(tmp_path / FLUENT_3D.file)
    out = tmp_path / "new" / "sprites.npz"
    assert run_cli("--out", str(out), "--packages", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sprites"], report["sprite_px"], report["bytes"]) == (2, 32, out.stat().st_size)
    assert load_sprites(out).names == ("block", "bar")


def test_the_command_tells_a_mistake_in_one_line(archive, tmp_path, capsys):
    archive.rename(tmp_path / FLUENT_3D.file)
    assert run_cli("--out", str(tmp_path / "sprites.npz"), "--packages", str(tmp_path)) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert "must have sha256" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert not (tmp_path / "sprites.npz").exists()
