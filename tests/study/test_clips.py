"""The fidelity study on a tiny pipeline: equal density, resuming, shards, the report."""

import dataclasses
import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffsieve.compare.clip import generate_clip
from diffsieve.compare.lines import read_lines
from diffsieve.compare.prepare import prepare, resolve_place
from diffsieve.compare.shards import Deadline, Shard
from diffsieve.errors import UserInputError
from diffsieve.eval import psnr
from diffsieve.processors import BAAttConfig, sparse_attention, sparsity_summary
from diffsieve.study import SUITES, VARIANTS, RecallConfig, StudyConfig, study_clips
from diffsieve.study.first_steps import FirstSteps
from diffsieve.study.prompts import held_out_prompts
from diffsieve.study.report import write_report
from diffsieve.study.variants import FLOOR, choose, config_of
from tests.tiny import wan_pipeline


def lines_of(out):
    return [json.loads(line) for path in sorted(out.glob("clips-*.jsonl")) for line in path.read_text().splitlines()]


class Stop(Deadline):
    """A deadline after so many pieces of work."""

    def __init__(self, pieces):
        super().__init__(None)
        self.left = pieces

    def end(self):
        super().end()
        self.left -= 1

    @property
    def passed(self):
        return self.left <= 0


def test_every_variant_runs_at_the_same_density_and_is_measured(pipe, study):
    config = study(suites=("fidelity", "sort"))
    result = study_clips(config, pipe=pipe, command=["diffsieve", "study", "clips"])
    assert (result["missing"], result["other_shards_missing"]) == (0, 0)
    report = json.loads((config.out / "study.json").read_text(encoding="utf-8"))
    rows = {(row["variant"], row["sparsity"]): row for row in report["clips"]["rows"]}
    assert set(rows) == {(FLOOR, None)} | {(name, s) for name in VARIANTS for s in (0.34, 0.6)}
    assert result["done"] == len(rows)
    # 3 blocks: two or one of them kept.
    for (name, sparsity), row in rows.items():
        if name == FLOOR:
            assert row["kernels"] == ["_native_math"]
            continue
        if name in ("preset default", "first layer dense"):
            continue
        kept = {0.34: 2 / 3, 0.6: 1 / 3}[sparsity]
        assert row["density_sparse_steps"] == pytest.approx(kept), name
        assert row["metrics"]["psnr"]["n"] == row["clips"] == 1
        assert row["metrics"]["lpips[alex]"]["mean"] is None
    assert rows["first layer dense", 0.6]["skipped"] or rows["first layer dense", 0.6]["density_sparse_steps"] > 0.3
    assert rows["preset default", 0.6]["density_sparse_steps"] == pytest.approx((1 + 2 / 3) / 3)
    assert any("weights" in reason for reason in report["clips"]["reasons"]["lpips[alex]"])
    assert rows[FLOOR, None]["metrics"]["psnr"]["mean"] > 60
    assert rows["paper", 0.6]["over_paper"] is None
    gain = rows["default", 0.6]["over_paper"]["psnr"]["mean"]
    assert gain == pytest.approx(rows["default", 0.6]["psnr_by_clip"][0] - rows["paper", 0.6]["psnr_by_clip"][0])
    for name in ("default", "base"):
        over = rows["random", 0.6][f"over_{name}"]["psnr"]["mean"]
        assert over == pytest.approx(rows["random", 0.6]["psnr_by_clip"][0] - rows[name, 0.6]["psnr_by_clip"][0])
        assert rows[name, 0.6][f"over_{name}"] is None
    distinct = {round(rows[name, 0.6]["psnr_by_clip"][0], 6) for name in VARIANTS if rows[name, 0.6]["clips"]}
    assert len(distinct) > 12, "variants must not all be the same computation"
    page = (config.out / "study.html").read_text(encoding="utf-8")
    assert "PSNR against sparsity" in page
    assert "<td>antidiagonal 8</td>" in page


@pytest.mark.parametrize("warmup", [0.2, 0.6, 0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("paper", {"preset": "paper"}),
        ("default", {}),
        ("base", {"budgets": "equal", "beta": 0.5}),
        ("beta 1", {"budgets": "equal", "beta": 1.0}),
        ("measured budgets", {"budgets": "auto", "beta": 0.5}),
        ("no centring", {"budgets": "equal", "beta": 0.5, "center_keys": False}),
    ],
)
def test_a_variant_is_what_a_user_would_run(name, options, warmup, pipe, study):
    config = study(suites=(), variants=(name,), sparsities=(0.6,), warmup=warmup)
    study_clips(config, pipe=pipe)
    line = lines_of(config.out)[1]  # after the noise floor, whose kernel must not stay
    filled = prepare(resolve_place(config, pipe), pipe=pipe, attention=None).config
    dense = generate_clip(pipe, filled, prompt="a cat moves left", seed=0).frames
    own = BAAttConfig(sparsity=0.6, warmup_steps=warmup, block_size=16, min_tokens=0, dense_layers=(), **options)
    with sparse_attention(pipe, own):
        sparse = generate_clip(pipe, filled, prompt="a cat moves left", seed=0).frames
        summary = sparsity_summary(pipe)
    assert line["metrics"]["psnr"] == psnr(dense, sparse).mean
    assert line["density_overall"] == summary.density_overall
    assert (line["steps_dense"], line["steps_total"]) == (summary.steps_dense, 5)
    assert "forward" not in pipe.transformer.__dict__


def test_steps_that_all_variants_begin_with_are_computed_once(pipe, study, monkeypatch):
    steps, before = [], pipe.transformer.blocks[1].forward

    def forward(*args, **kwargs):
        steps.append(pipe.scheduler.step_index or 0)
        return before(*args, **kwargs)

    monkeypatch.setattr(pipe.transformer.blocks[1], "forward", forward)
    study_clips(study(suites=(), variants=("paper", "default"), sparsities=(0.6,), warmup=0.6, floor=False), pipe=pipe)
    branches, clips = 2, 3
    assert Counter(steps) == dict.fromkeys((0, 1), branches) | dict.fromkeys((2, 3, 4), branches * clips)


def test_first_steps_are_computed_where_the_inputs_or_the_kernel_are_others(pipe):
    seen, inputs = [], {"hidden_states": torch.ones(1, 2), "timestep": torch.tensor([3])}
    transformer = SimpleNamespace(forward=lambda **x: seen.append(x) or (x["hidden_states"] + 1,))
    transformer._diffsieve_controller = SimpleNamespace(replaces_dense_calls=False, count_dense_forward=lambda: None)
    first = FirstSteps(transformer, 1)
    with first.kept():
        (out,) = transformer.forward(**inputs)
        out.zero_()  # what a pipeline does with it stays its own
        first.after_step(1)
        transformer.forward(**inputs)
    for changed, kernel, forwards in ((inputs, False, 0), ({**inputs, "timestep": torch.tensor([4])}, False, 1),
                                      (inputs, True, 1)):  # fmt: skip
        transformer._diffsieve_controller.replaces_dense_calls = kernel
        seen.clear()
        with first.reused():
            assert torch.equal(transformer.forward(**changed)[0], torch.full((1, 2), 2.0))
        assert len(seen) == forwards


def test_a_stopped_study_goes_on_and_ends_up_the_same(pipe, study, tmp_path):
    changes = {"suites": (), "variants": ("paper", "random", "hindsight"), "seed": (0, 1)}
    config = study(**changes)
    first = study_clips(config, pipe=pipe, deadline=Stop(3))
    assert (first["done"], first["missing"]) == (2, 12)
    assert not (config.out / "study.json").exists()
    before = lines_of(config.out)
    told = []
    second = study_clips(config, pipe=pipe, progress=told.append)
    assert (second["done"], second["missing"], len(told)) == (14, 0, 12)
    assert told[-1].startswith("[12/12, 0:00:00 left] a cat moves left, seed 1: ")
    assert lines_of(config.out)[:2] == before
    whole = study(**changes, out=tmp_path / "whole")
    study_clips(whole, pipe=pipe)

    def figures(out):
        return {(x["seed"], x["variant"], x["sparsity"]): x["metrics"] for x in lines_of(out)}

    assert figures(config.out) == figures(whole.out)


def test_shards_share_the_clips_and_the_last_one_reports(pipe, study):
    config = study(suites=(), variants=("paper",), sparsities=(0.6,), seed=(0, 1, 2))
    one = study_clips(config, pipe=pipe, shard=Shard(0, 2))
    assert one == {"out": str(config.out), "done": 4, "missing": 0, "other_shards_missing": 2}
    assert not (config.out / "study.json").exists()
    other = study_clips(config, pipe=pipe, shard=Shard(1, 2))
    assert (other["done"], other["other_shards_missing"]) == (6, 0)
    assert (config.out / "study.json").exists()
    assert {path.name for path in config.out.glob("*.jsonl")} == {"clips-0.jsonl", "clips-1.jsonl"}


def test_an_unfinished_study_compares_variants_on_the_same_clips(pipe, study):
    config = study(
        suites=(),
        variants=("paper", "random"),
        sparsities=(0.34, 0.6),
        seed=(0, 1),
        prompt=("a cat", "a dog"),
        floor=False,
    )
    study_clips(config, pipe=pipe, deadline=Stop(1 + 4 + 1 + 4 + 1 + 3))
    lines = [(line["seed"], line["prompt"], line["sparsity"], line["variant"]) for line in lines_of(config.out)]
    # All prompts with the first seed, then the next seed; in each all variants of a sparsity, then the next sparsity.
    clips = [(0, "a cat"), (0, "a dog"), (1, "a cat")]
    assert lines == [(*clip, s, v) for clip in clips for s in (0.34, 0.6) for v in ("paper", "random")][:11]
    found = write_report(config.out)["clips"]
    assert not found["complete"]
    rows = {(row["variant"], row["sparsity"]): row for row in found["rows"]}
    assert {key: row["clips"] for key, row in rows.items()} == {
        ("paper", 0.34): 3, ("random", 0.34): 3, ("paper", 0.6): 2, ("random", 0.6): 2,
    }  # fmt: skip
    assert rows["random", 0.6]["over_paper"]["psnr"]["n"] == 2
    # Sparsities are compared on the clips of all rows.
    at_34, at_60 = rows["random", 0.34], rows["random", 0.6]
    assert at_34["in_all_rows"]["clips"] == at_60["in_all_rows"]["clips"] == 2
    assert at_60["in_all_rows"]["metrics"]["psnr"] == at_60["metrics"]["psnr"]["mean"]
    both = [line["metrics"]["psnr"] for line in lines_of(config.out)
            if (line["seed"], line["variant"], line["sparsity"]) == (0, "random", 0.34)]  # fmt: skip
    assert at_34["in_all_rows"]["metrics"]["psnr"] == pytest.approx(sum(both) / 2)
    assert at_34["metrics"]["psnr"]["mean"] != pytest.approx(sum(both) / 2)
    page = (config.out / "study.html").read_text("utf-8")
    assert found["missing"] == 5
    assert "unfinished, 5 clips are missing: the rows of a sparsity are over the clips" in page
    assert "the charts are over the 2 that all rows have" in page
    assert study_clips(config, pipe=pipe)["missing"] == 0
    assert json.loads((config.out / "study.json").read_text("utf-8"))["clips"]["complete"]


@pytest.mark.parametrize(("pieces", "missing"), [(1 + 2, 2), (1 + 1, 3)], ids=["between prompts", "between variants"])
def test_a_study_that_stopped_with_equal_rows_is_not_complete(pieces, missing, pipe, study):
    config = study(
        suites=(), variants=("paper", "random"), sparsities=(0.6,), prompt=("a cat", "a dog"), floor=False
    )  # fmt: skip
    study_clips(config, pipe=pipe, deadline=Stop(pieces))
    found = write_report(config.out)["clips"]
    assert (found["complete"], found["missing"]) == (False, missing)
    note = f"unfinished, {missing} clips are missing: the rows that are there are over the same clips"
    assert note in (config.out / "study.html").read_text("utf-8")
    study_clips(config, pipe=pipe)
    found = json.loads((config.out / "study.json").read_text("utf-8"))["clips"]
    assert (found["complete"], found["missing"]) == (True, 0)
    assert "unfinished" not in (config.out / "study.html").read_text("utf-8")
    # What the last call asked for counts.
    study_clips(dataclasses.replace(config, seed=(0, 1)), pipe=pipe, deadline=Stop(0))
    assert write_report(config.out)["clips"]["missing"] == 4


def test_where_a_study_did_not_say_what_was_asked_for_it_is_not_called_complete(pipe, study):
    config = study(suites=(), variants=("paper",), sparsities=(0.6,), floor=False)
    study_clips(config, pipe=pipe)
    (config.out / "clips.asked.json").unlink()  # as an earlier version left it
    found = write_report(config.out)["clips"]
    assert (found["complete"], found["missing"]) == (None, None)
    assert "whether clips are missing is not known" in (config.out / "study.html").read_text("utf-8")


def test_legs_with_other_numbers_of_shards_go_on_from_each_other(pipe, study):
    """The third leg finds what three processes and then two of five wrote, a torn line among it."""
    config = study(suites=(), variants=("paper",), sparsities=(0.6,), seed=(0, 1, 2, 3, 4))
    for index in range(3):
        study_clips(config, pipe=pipe, shard=Shard(index, 3), deadline=Stop(2))
    with (config.out / "clips-1.jsonl").open("a") as file:
        file.write('{"prompt": "a cat moves left", "se')  # a process was killed here
    for index in (4, 1):
        study_clips(config, pipe=pipe, shard=Shard(index, 5))
    before = read_lines(config.out, "clips")
    done = study_clips(config, pipe=pipe, shard=Shard(0, 1))
    assert (done["done"], done["missing"], done["other_shards_missing"]) == (10, 0, 0)
    after = lines_of(config.out)
    assert all(line in after for line in before)
    assert len(after) == len({(line["seed"], line["variant"]) for line in after}) == 10, "a clip was made twice"
    assert json.loads((config.out / "study.json").read_text("utf-8"))["clips"]["complete"]


def test_more_may_be_asked_for_later_but_not_something_else(pipe, study):
    config = {"suites": (), "variants": ("paper",), "sparsities": (0.6,)}
    study_clips(study(**config), pipe=pipe)
    assert study_clips(study(**config | {"variants": ("paper", "random"), "seed": (0, 1)}), pipe=pipe)["done"] == 6
    with pytest.raises(UserInputError, match="steps must be 5 to resume"):
        study_clips(study(**config, steps=4), pipe=pipe)
    with pytest.raises(UserInputError, match="warmup must be"):
        study_clips(study(**config, warmup=0.5), pipe=pipe)


@pytest.mark.parametrize("name", ["orders_chosen_by", "budgets", "beta"])
def test_lines_of_another_default_are_refused(pipe, study, name):
    config = study(suites=(), variants=("paper",), sparsities=(0.6,))
    study_clips(config, pipe=pipe)
    path = config.out / "clips.settings.json"
    earlier = json.loads(path.read_text("utf-8"))
    del earlier["settings"][name]  # as written when the criterion was recall, budgets were equal, and beta was 1/2
    path.write_text(json.dumps(earlier), "utf-8")
    with pytest.raises(UserInputError, match=f"{name} must be None to resume"):
        study_clips(config, pipe=pipe)


def test_two_transformers_have_no_hindsight(study):
    config = study(suites=(), variants=("hindsight", "order by recall", "paper"), sparsities=(0.6,), floor=False)
    study_clips(config, pipe=wan_pipeline(two=True))
    skipped = {line["variant"]: line.get("skipped") for line in lines_of(config.out)}
    assert "two transformers" in skipped["hindsight"]
    assert "two transformers" in skipped["order by recall"]
    assert skipped["paper"] is None


def test_prompts_must_be_given_for_other_models(pipe, study):
    with pytest.raises(UserInputError, match="only mini-wan has prompts of its own"):
        study_clips(study(prompt=()), pipe=pipe)
    assert len(set(held_out_prompts(24))) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("nothing",), (), ()), "suite must be one of"),
        (((), ("nothing",), ()), "variant must be one of"),
        (((), ("paper",), (1.0,)), r"sparsity must be in \(0, 1\)"),
        (((), (), ()), "got neither"),
    ],
    ids=["suite", "variant", "sparsity", "nothing"],
)
def test_wrong_choices_are_refused(arguments, message):
    with pytest.raises(UserInputError, match=message):
        choose(*arguments)


def test_one_sparsity_is_refused_where_sparsities_are_meant(study):
    assert study(block_size=8, warmup=1, backend="torch").backend == "torch"
    with pytest.raises(UserInputError, match="sparsity, min_tokens must be left out"):
        study(sparsity=0.5, min_tokens=0)


@pytest.mark.parametrize("make", [StudyConfig, partial(RecallConfig, captures=Path("none"))], ids=["clips", "recall"])
def test_block_sizes_that_no_variant_takes_are_refused_before_anything_runs(make):
    with pytest.raises(UserInputError, match=r"block_size must be at most 65536, got 1000000000"):
        make(block_size=10**9)


def test_suites_name_their_sparsities():
    assert {s for _, s in choose(("sort",), (), ())} == {0.5, 0.7, 0.9}
    assert {s for _, s in choose(("fidelity",), (), ())} == {0.5, 0.6, 0.75, 0.9}
    together = [s for _, s in choose(("fidelity", "sort"), (), ())]
    assert list(dict.fromkeys(together)) == [0.5, 0.6, 0.75, 0.9, 0.7]
    assert together == sorted(together, key=[0.5, 0.6, 0.75, 0.9, 0.7].index), "a sparsity is not in one piece"
    assert len(choose(tuple(SUITES), (), ())) == len(set(choose(tuple(SUITES), (), ())))
    assert choose((), ("random",), ()) == [("random", 0.5)]


def test_equal_totals_hold_back_what_the_dense_layer_costs():
    arguments = {"num_layers": 8, "num_tokens": 4032, "warmup": 0.2, "block_size": 128}
    config = config_of(VARIANTS["first layer dense"], 0.5, **arguments)
    assert isinstance(config, BAAttConfig)
    assert (1 + 7 * config.kept) / 8 == pytest.approx(0.5)
    assert "exceed a density of 0.1" in config_of(VARIANTS["first layer dense"], 0.9, **arguments)
    window = config_of(VARIANTS["window x2"], 0.5, **arguments)
    assert isinstance(window, BAAttConfig)
    assert window.window == 512
