"""`diffsieve app --model PATH` as a user starts it, and `diffsieve compare`, which makes the same files."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from diffsieve.cli import main
from tests import tiny_pixels
from tests.app.acting import eventually, press_compare, same, shoot, tab
from tests.app.browser import opened
from tests.app.conftest import small
from tests.app.test_families import PICTURE, handlers_of
from tests.tiny import wan_pipeline


@contextmanager
def command(*words):
    """Run the command and give the address that it prints; Ctrl-C must end it with 0."""
    program = [sys.executable, "-m", "diffsieve", "app", *words]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        # Tests that a shell started in the background ignore it, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line.startswith("diffsieve is at http://127.0.0.1:")
            yield line.split()[3]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="sends the signal of Ctrl-C, which Windows has not")
def test_a_folder_with_a_pixel_dit_goes_through_the_page(browser, tmp_path):
    """Dense against LLSA with the numbers of its training, the blocks of keys that it chose, and a clicked pixel."""
    folder = tmp_path / "my-pixels"
    tiny_pixels.pipeline().save_pretrained(folder)
    words = ("--model", str(folder), "--folder", str(tmp_path / "store"), "--device", "cpu")
    with command(*words) as url, opened(browser, url) as watched:
        page = watched.page
        assert page.get_by_label("Model", exact=True).input_value() == "mini-wan"
        page.get_by_label("Model", exact=True).click()
        page.get_by_role("option", name="my-pixels").click()
        page.locator("#ds-told", has_text="my-pixels is loaded.").wait_for()
        page.get_by_label("Class", exact=True).wait_for()
        eventually(lambda: same(page.get_by_label("Method").input_value(), "LLSA"))
        eventually(lambda: same(page.get_by_label("Top k, blocks kept per level").first.input_value(), "2"))
        press_compare(page)
        page.get_by_role("group", name=f"{tiny_pixels.CLASSES[0]}: dense and LLSA top 2").wait_for()
        pictures = "[...document.querySelectorAll('diffsieve-player img')].map((i) => i.naturalWidth)"
        eventually(lambda: same(page.evaluate(pictures), [16, 16, 16]))
        tab(page, "Metrics")
        page.get_by_role("table").filter(has_text="Distance from the dense picture").wait_for()
        tab(page, "Attention")
        told = page.locator(".ds-spot")
        told.filter(has_text="row 8, column 8 attended to 16 of 256 tokens (6.2%) in detail").wait_for()
        eventually(lambda: same(page.evaluate("document.querySelector('#ds-mask img')?.naturalWidth > 200"), True))
        sizes = "(() => { const i = document.querySelector('#ds-spot img'); return [i.naturalWidth, i.clientWidth] })()"
        eventually(lambda: same(all(page.evaluate(sizes)), True))
        natural, width = page.evaluate(sizes)
        # Captions take 20 pixels above the picture, whose tokens have 448 / 16 pixels.
        place = {"x": (12 + 28 * 3.5) * width / natural, "y": (12 + 20 + 28 * 2.5) * width / natural}
        page.locator("#ds-spot img").click(position=place)
        told.filter(has_text="row 2, column 3 attended to 16 of 256").wait_for()
        shoot(page, "command-pixel-dit")
        tab(page, "Run info")
        eventually(
            lambda: same("model='my-pixels',  # the folder of" in page.locator(".cm-content").inner_text(), True)
        )


CLIP = {"frames": 9, "width": 32, "height": 32, "sparsity": 0.5, "warmup": 0.25, "block-size": 8, "min-tokens": 0}


@pytest.mark.parametrize(
    ("pipe", "asked", "flags", "kind"),
    [
        (wan_pipeline, {}, CLIP | {"prompt": "a cat moves left", "steps": 4, "preset": "default"}, "mp4"),
        (tiny_pixels.pipeline, PICTURE | {"method": "llsa"},
         {"prompt": "Objects", "steps": 3, "width": 24, "height": 16, "method": "llsa"}, "png"),
    ],
    ids=["clips", "pictures"],
)  # fmt: skip
def test_the_command_line_makes_the_same_files(pipe, asked, flags, kind, tmp_path):
    handlers = handlers_of(pipe(), tmp_path)
    run = handlers.compare(small(model="my-model", **asked), owner="me", tell=lambda share, text: None)
    flags = flags | {"model": tmp_path / "my-model", "out": tmp_path / "out", "guidance-scale": 1.0, "device": "cpu"}
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])
    assert not ended.value.code
    folder = tmp_path / "out" / run.clip["folder"]
    names = sorted(path.name for path in folder.glob(f"*.{kind}"))
    assert {f"dense.{kind}", f"sparse.{kind}"} <= set(names)
    for name in names:
        assert (folder / name).read_bytes() == (run.folder / run.clip["folder"] / name).read_bytes(), name
    handlers.store.close()
