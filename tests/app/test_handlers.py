"""Runs of the handlers on a tiny pipeline: what is computed once, what a cancelled or failed run leaves behind."""

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffsieve.app import handlers as module
from diffsieve.app.errors import AppError, CancelledError, explain
from diffsieve.app.models import Shelf
from diffsieve.errors import DiffsieveError, UserInputError
from tests.app.conftest import make_handlers, small
from tests.app.serving import Tiny

LAYER = "transformer.blocks.1"


def files_under(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def run(handlers, told=None, **changes):
    return handlers.compare(small(**changes), owner="me", tell=told[1] if told else lambda share, text: None)


def no_processor_is_installed(handlers):
    processors = handlers.shelf.get("tiny").pipe.transformer.attn_processors.values()
    return all(type(processor).__module__.startswith("diffusers.") for processor in processors)


def test_a_run_has_everything_that_the_page_shows(handlers, told):
    found = run(handlers, told)
    for key in ("dense", "sparse", "side_by_side", "difference_clip", "masks"):
        assert found.file(key).is_file()
    assert found.report["settings"]["model"] == "WanPipeline"  # a pipeline without a source is called by its class
    assert found.clip["metrics"]["psnr"]["mean"] < 100
    assert found.clip["metrics"]["ms_ssim"]["reason"]
    with Image.open(found.folder / "poster.png") as poster:
        assert max(poster.size) >= 128
    shares, lines = zip(*told[0], strict=True)
    assert list(shares) == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    assert lines[0] == "dense clip, step 1 of 4"
    assert any(line.startswith("sparse clip, step 3 of 4, about") for line in lines)
    assert lines[-1] == "done"
    for secret in (str(handlers.store.root), str(Path.home()), "/checkpoints"):
        assert secret not in json.dumps(found.report)


def test_the_same_settings_are_not_computed_again(handlers, told):
    first = run(handlers)
    again = run(handlers, told, steps=4.0)
    assert again.id == first.id
    assert told[0] == []
    assert len(handlers.runs()) == 1


def test_the_model_is_loaded_once(tmp_path):
    load = Tiny()
    handlers = make_handlers(tmp_path / "store", load=load)
    run(handlers)
    run(handlers, seed=1)
    assert load.loads == 1
    handlers.store.close()


@pytest.mark.parametrize("changes", [{"sparsity": 0.75}, {"warmup": 0.5}, {"block_size": 6}, {"preset": "paper"}])
def test_the_dense_clip_is_reused_when_only_the_sparse_attention_changes(handlers, told, changes):
    first = run(handlers)
    second = run(handlers, told, **changes)
    assert second.id != first.id
    assert not any("dense clip" in line for _, line in told[0])
    assert second.clip["seconds"]["dense"] == first.clip["seconds"]["dense"]


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"prompt": "a dog moves right"}, {"steps": 3}, {"width": 48}, {"frames": 5}]
)
def test_the_dense_clip_is_made_anew_when_the_clip_changes(handlers, told, changes):
    run(handlers)
    run(handlers, told, **changes)
    assert any("dense clip" in line for _, line in told[0])


@pytest.mark.parametrize("stop_at", ["dense clip, step 2", "sparse clip, step 3", "measuring"])
def test_a_cancelled_run_leaves_nothing_behind(handlers, stop_at):
    def tell(share, text):
        if text.startswith(stop_at):
            assert handlers.cancel("somebody else") == 0
            assert handlers.cancel("me") == 1

    with pytest.raises(CancelledError):
        handlers.compare(small(), owner="me", tell=tell)
    assert no_processor_is_installed(handlers)
    assert not handlers.jobs.busy
    assert [name for name in files_under(handlers.store.root) if not name.startswith("dense/")] == []
    assert not any("part" in name for name in files_under(handlers.store.root))
    assert run(handlers).clip["metrics"]["psnr"]["mean"] < 100


def test_a_waiting_job_can_be_cancelled_and_the_next_one_runs(handlers):
    reached, go_on = threading.Event(), threading.Event()
    results = {}

    def tell(share, text):
        reached.set()
        assert go_on.wait(30)

    def work(owner, seed, tell):
        try:
            results[owner] = handlers.compare(small(seed=seed), owner=owner, tell=tell)
        except DiffsieveError as error:
            results[owner] = error

    first = threading.Thread(target=work, args=("first", 0, tell))
    first.start()
    assert reached.wait(30)
    second = threading.Thread(target=work, args=("second", 1, lambda share, text: None))
    second.start()
    while handlers.cancel("second") == 0:
        pass
    second.join(30)
    assert isinstance(results["second"], CancelledError)
    assert "first" not in results, "the first job must still be at work"
    go_on.set()
    first.join(60)
    assert results["first"].clip["seed"] == 0


class Breaks:
    """Makes the third forward of the transformer fail."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, *_arguments):
        self.calls += 1
        if self.calls == 3:
            raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("CUDA error at /usr/lib/secret.so"), "the run failed with RuntimeError; entry [0-9a-f]{8} of"),
        (MemoryError(), "the memory does not hold this run"),
        (ValueError("bad"), "the run failed with ValueError"),
    ],
)
def test_a_model_that_fails_in_the_middle(handlers, error, message, caplog):
    earlier = run(handlers, seed=5)
    pipe = handlers.shelf.get("tiny").pipe
    hook = pipe.transformer.register_forward_pre_hook(Breaks(error))
    with pytest.raises(type(error)) as raised:
        run(handlers)
    hook.remove()
    shown = explain(raised.value)
    assert isinstance(shown, AppError)
    with pytest.raises(AppError, match=message):
        raise shown
    assert "/usr" not in str(shown)
    assert "Traceback" in caplog.text
    assert no_processor_is_installed(handlers)
    assert [found.id for found in handlers.runs()] == [earlier.id]
    assert run(handlers).id != earlier.id


def test_a_full_disk_is_told_and_loses_no_finished_run(handlers, monkeypatch):
    earlier = run(handlers, seed=5)

    def no_space(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/place")

    monkeypatch.setattr("diffsieve.compare.pair_files.write_mp4", no_space)
    with pytest.raises(OSError, match="No space") as raised:
        run(handlers)
    monkeypatch.undo()
    assert "the disk of the server is full; finished runs are still there" in str(explain(raised.value))
    assert "/secret" not in str(explain(raised.value))
    assert [found.id for found in handlers.runs()] == [earlier.id]
    assert not list((handlers.store.root / "work").iterdir())
    assert run(handlers).clip["seed"] == 0


def test_a_sweep_makes_the_dense_clip_once_and_keeps_every_run(handlers, told):
    runs = handlers.sweep(small(), [0.75, 0.25], owner="me", tell=told[1])
    assert [found.report["settings"]["sparsity"] for found in runs] == [0.25, 0.75]
    densities = [found.clip["sparsity"]["density_overall"] for found in runs]
    assert densities[0] > densities[1]
    lines = [line for _, line in told[0]]
    assert lines[0] == "run 1 of 2, dense clip, step 1 of 4"
    assert any(line.startswith("run 2 of 2, sparse clip") for line in lines)
    assert not any(line.startswith("run 2 of 2, dense clip") for line in lines)
    assert [share for share, _ in told[0]] == sorted(share for share, _ in told[0])
    assert run(handlers, sparsity=0.25).id == runs[0].id


def test_the_mask_of_any_layer_head_and_step(handlers):
    found = run(handlers)
    masks = handlers.masks(found.id)
    assert masks.layer_names() == [LAYER, "transformer.blocks.2"]
    pictures = {
        np.asarray(handlers.mask_view(found.id, layer, step, head)).tobytes()
        for layer in masks.layer_names()
        for step in masks.steps_of(layer)
        for head in range(masks.heads)
    }
    assert len(pictures) == 2 * 3 * 2
    for place in (("nowhere", 1, 0), (LAYER, 0, 0), (LAYER, 1, 2), (LAYER, "1", 0), (LAYER, 1, None)):
        with pytest.raises(UserInputError):
            handlers.mask_view(found.id, *place)


def test_a_spot_shows_what_its_query_attended_to(handlers):
    found = run(handlers)
    spot = handlers.spot_view(found.id, LAYER, 2, 1, (1, 3, 0))
    assert spot.tokens == 48
    assert spot.attended == handlers.masks(found.id).attended(LAYER, 2, 1, (1, 3, 0)).sum() == 24
    left, top = spot.layout.corner(spot.layout.shown.index(1))
    width, height = spot.layout.panel
    assert spot.layout.locate(left + 1, top + height - 1) == (1, 3, 0)
    assert spot.layout.locate(left + width - 1, top) == (1, 0, 3)
    assert spot.layout.locate(0, 0) is None
    assert spot.picture.size == spot.layout.size
    pixels = np.asarray(spot.picture)
    assert (pixels == (255, 214, 10)).all(axis=-1).any(), "the query is outlined"
    for token in ((3, 0, 0), (0, 4, 0), (0, 0, -1), (0, 0, "1"), (0, 0, None)):
        with pytest.raises(UserInputError):
            handlers.spot_view(found.id, LAYER, 2, 1, token)


def test_llsa_runs_with_its_warning_and_shows_what_it_chose(handlers):
    found = run(handlers, method="llsa", topk=2, block_size=4)
    assert "was not trained with it" in found.clip["notes"][0]
    assert handlers.masks(found.id).steps_of(LAYER) == [0, 1, 2, 3]
    assert handlers.mask_view(found.id, LAYER, 3, 1).width > 200
    spot = handlers.spot_view(found.id, LAYER, 3, 1, (1, 3, 0))
    assert (spot.attended, spot.tokens, spot.means) == (8, 48, ((4, 40),))
    with pytest.raises(AppError, match="this run of LLSA kept no block mask: its tokens fit into one block"):
        handlers.masks(run(handlers, method="llsa", topk=2, block_size=64).id)
    assert run(handlers, method="llsa", topk=2, block_size=4, sparsity=0.9, warmup=None).id == found.id
    assert run(handlers, method="llsa", topk=3, block_size=4).id != found.id


def test_a_run_that_was_dense_says_so_instead_of_a_mask(handlers):
    found = run(handlers, min_tokens=1000)
    with pytest.raises(AppError, match="every step of this run was dense"):
        handlers.mask_view(found.id, LAYER, 1, 0)
    assert "short sequence" in found.clip["notes"][0]


@pytest.mark.parametrize("run_id", ["../runs", "", None, 5, ["a"], "x" * 1000, "missing", "/etc/passwd"])
def test_an_unknown_run_is_refused(handlers, run_id):
    with pytest.raises(AppError, match="this run is not there any more"):
        handlers.mask_view(run_id, LAYER, 1, 0)
    with pytest.raises(AppError, match="this run is not there any more"):
        handlers.store.keep(run_id, True)


def test_two_runs_of_different_sizes_are_not_set_against_each_other(handlers):
    first, other, wide = run(handlers), run(handlers, sparsity=0.75), run(handlers, width=48)
    assert [found.id for found in handlers.pair(first.id, other.id)] == [first.id, other.id]
    with pytest.raises(AppError, match="of one size, got a clip of 9 frames of 32 x 32 and a clip of 9 frames of 48"):
        handlers.pair(first.id, wide.id)


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "hub"])
def test_wrong_values_are_refused_before_the_model_is_loaded(tmp_path, folder):
    load = Tiny()
    handlers = make_handlers(tmp_path / "store", load=load)
    wrong = [{"steps": 0}, {"method": "none"}, {"seed": -1}, {"sparsity": 2.0}, {"width": 10**9}, {"block_size": "x"}]
    if folder:  # which says that it makes clips
        handlers.shelf = Shelf({"tiny": str(tmp_path)}, load=load)
        (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
        wrong += [{"prompt": ""}, {"frames": 10**9}, {"width": 40}]
    for changes in wrong:
        with pytest.raises(UserInputError, match="must"):
            run(handlers, **changes)
        with pytest.raises(UserInputError, match="must"):
            handlers.sweep(small(**changes), changes.get("sparsity", [0.5]), owner="me", tell=lambda share, text: None)
    assert load.loads == 0
    handlers.store.close()


def test_a_model_that_does_not_fit_is_told_with_those_that_are_kept(tmp_path, caplog):
    def load(model, **options):
        if model == "large":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        return Tiny()(model)

    handlers = make_handlers(tmp_path / "store")
    handlers.shelf = Shelf({"tiny": "tiny", "large": "large"}, load=load)
    with pytest.raises(UserInputError, match=r"^model must fit into the memory of the server, got large$"):
        handlers.load("large", owner="me")
    run(handlers)
    with pytest.raises(UserInputError, match=r"got large beside tiny, which the server keeps$"):
        run(handlers, model="large")
    assert "Tried to allocate 20 GiB" in caplog.text
    assert run(handlers, seed=1).report["seed"] == [1]
    handlers.store.close()


def test_only_an_offered_model_is_loaded(handlers):
    with pytest.raises(UserInputError, match="model must be one of tiny"):
        handlers.load("/etc", owner="me")
    with pytest.raises(AppError, match="model must be a text"):
        handlers.load(None, owner="me")
    assert module.__name__ == "diffsieve.app.handlers"
