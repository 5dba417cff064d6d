"""The study of pixel DiT's attention: variants trained on the same budget of pictures, then sampled and measured.

    PYTHONPATH=. python benchmarks/pixel_dit_study.py run --data .data/emoji --work WORK --side 64 [--variants A,B]
    PYTHONPATH=. python benchmarks/pixel_dit_study.py run --data .data/emoji --work WORK --side 128 [--variants A,B]
    PYTHONPATH=. python benchmarks/pixel_dit_study.py measure --data .data/emoji --work WORK --side 64
    PYTHONPATH=. python benchmarks/pixel_dit_study.py report --work WORK --out benchmarks/results/h200 \
        --charts docs/images --gpu "NVIDIA H200" --python 3.12 --torch 2.11.0+cu130 --triton 3.6.0

`run` trains each variant and draws its samples (`train` and `sample` do one of the two). It is meant for a CUDA GPU,
and "llsa without weights" needs one. What is finished is skipped, so a call can be repeated in legs (`--max-seconds`:
no variant begins shortly before that; one in training pauses and goes on in the next call). Exit code 3: something is
left; 1: a variant failed. `--shard 0/2` takes every second variant: one process for each GPU, with
CUDA_VISIBLE_DEVICES. `--turns FILE` lets several calls share one GPU: each compiles what its variant needs beside the
others (two steps, one batch of samples), then waits for its turn to train and to draw. At 128 pixels every variant
begins with its weights of 64 ("llsa 1 level" with those of "llsa", which has one level there), when WORK holds them:
`began_at_64` in the report. `measure` needs no GPU, but the feature network (`diffsieve weights effnet` and the extra
eval). `report` writes `pixel_dit_study.json`, where rows of earlier calls stay unless WORK holds no less of them, and
charts of the distances; it can run elsewhere, so it is told on what `run` did. `--layers`, `--images`, `--samples` and
`--steps` set the size of the study; keep them equal in all calls. `--seed` above 0 repeats trainings with other
weights, order of pictures and noise: `other_seeds` of their rows in the report. All seeds draw their samples from the
same noise.

The distance compares samples with the whole training set at that size, whose moments are exact: it is the population.
`floor` is that of as many pictures drawn from the set itself.
Training: the embedded model's width (3 heads of 64) and optimisers (Muon and AdamW, the rate falls in the second half),
bf16, averaged weights, no guidance in sampling, Euler steps.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from diffsieve.bench.drawing import Axis, Line, line_plot
from diffsieve.pipelines.loading import resolve_device, resolve_dtype
from diffsieve.pipelines.training.accelerating import fast_attention
from diffsieve.pipelines.training.checkpoint import write_atomically, write_json
from diffsieve.pipelines.training.pixel_dit.config import PixelTrainConfig
from diffsieve.pipelines.training.pixel_dit.images import load_images
from diffsieve.pipelines.training.pixel_dit.run import train_pixel_dit
from diffsieve.pipelines.training.pixel_dit.sampling import build_pipeline, contact_sheet, generate
from diffsieve.pipelines.training.pixel_dit.stage import load_transformer
from llsa_without_weights import BLOCK, TOPK, check_without_weights, drop_weights
from turns import turn

BATCH = {64: 64, 128: 16}
IMAGES = {64: 96_000, 128: 24_000}
SAMPLED_TOGETHER = {64: 200, 128: 50}  # divide 5,000: one compiled graph for all
SEED = "-seed-"  # in the names of folders
PAUSED = 3
SHORTEST = 30.0  # seconds of a leg in which it pays to begin
WITHOUT_WEIGHTS = "llsa without weights"


def variants(side: int) -> dict[str, dict[str, Any]]:
    """Settings of the model for each variant at a picture size; the form of reference is "llsa"."""
    levels = 2 if side >= 128 else 1
    pooled = math.ceil(side**2 / BLOCK**levels)
    equal = math.ceil((levels * TOPK * BLOCK + pooled) / BLOCK)
    return {
        "full": {"attention_method": "full"},
        "llsa": {"levels": levels},
        "llsa disjoint": {"levels": levels, "disjoint": True},
        WITHOUT_WEIGHTS: {"levels": levels},  # see `drop_weights`
        "llsa without enrichment": {"levels": levels, "enrich": False},
        "top-k equal keys": {"attention_method": "topk", "topk": equal},
        "llsa Morton": {"levels": levels, "token_order": "morton"},
        "llsa raster": {"levels": levels, "token_order": "raster"},
        f"llsa {3 - levels} level{'s' if levels == 1 else ''}": {"levels": 3 - levels},
    }


def keys_per_query(side: int, settings: dict[str, Any]) -> int:
    """How many keys and pooled tokens a query attends to, at most."""
    tokens, method = side**2, settings.get("attention_method", "llsa")
    if method == "full":
        return tokens
    topk = settings.get("topk", TOPK)
    if method == "topk" or not settings.get("enrich", True):
        return min(tokens, topk * BLOCK)
    levels = settings["levels"]
    return levels * topk * BLOCK + math.ceil(tokens / BLOCK**levels)


def settings_of(name: str, arguments: argparse.Namespace) -> PixelTrainConfig:
    side = arguments.side
    images, batch = arguments.images or IMAGES[side], BATCH[side]
    return PixelTrainConfig.from_dict(
        {
            "seed": arguments.seed,
            "model": variants(side)[name] | {"layers": arguments.layers},
            "dit": {
                "steps": images // batch,
                "phases": [{"side": side, "batch_size": batch}],
                "warmup": 0.05,
                "ema_decay": 0.99,
                "compile": torch.cuda.is_available(),
                "save_every": 60.0,
                "sample_every": 0.0,
            },
            "sampling": {"images": 9, "batch_size": 9, "steps": arguments.steps, "guidance_scale": 1.0},
        }
    )


def train_one(name: str, arguments: argparse.Namespace) -> int:
    """Train a variant in this process; the exit code says whether it paused."""
    out = folder_of(arguments.work, arguments.side, name, arguments.seed)
    if (out / "model" / "model_index.json").is_file():
        return 0
    start, small = None, min(BATCH)
    if arguments.side > small:
        start = folder_of(arguments.work, small, name if name in variants(small) else "llsa", arguments.seed)
        if not (start / "model").is_dir():
            print(f"{name}: no weights of {small} x {small}, begins with new ones", flush=True)
            start = None
    resumed = (out / "dit" / "state.pt").is_file()
    with having_the_gpu(arguments):
        max_seconds = None if arguments.deadline is None else arguments.deadline - time.monotonic()
        if max_seconds is not None and max_seconds < SHORTEST:
            return PAUSED
        summary = train_pixel_dit(
            out,
            arguments.data,
            None if resumed else settings_of(name, arguments),
            max_seconds=max_seconds,
            pause=max_seconds is not None,
            resume=resumed,
            start_from=start,
            report=lambda entry: (
                print(
                    f"{name}: step {entry.step} ({entry.progress:.0%}) loss {entry.losses['loss']:.4f}, "
                    f"{entry.samples_per_second:.0f} pictures/s, {entry.memory_gib:.1f} GiB",
                    flush=True,
                )
                if entry.step % 200 == 0
                else None
            ),
        )
    return 0 if summary["finished"] else PAUSED


def sample_one(name: str, arguments: argparse.Namespace) -> int:
    """Draw the samples of a trained variant: `samples.npz` and a contact sheet."""
    out = folder_of(arguments.work, arguments.side, name, arguments.seed)
    if (out / "samples.json").is_file():
        return 0
    if not (out / "model").is_dir():
        print(f"{name}: not trained yet")
        return PAUSED
    config = PixelTrainConfig.from_dict(json.loads((out / "settings.json").read_text()))
    classes = json.loads((out / "dit" / "data.json").read_text())["classes"]
    device = resolve_device(None)
    transformer = load_transformer(config, out / "dit", len(classes)).to(device, resolve_dtype(None, device))
    if config.dit.compile:
        transformer.compile_repeated_blocks(dynamic=False)
    pipe = build_pipeline(transformer, classes, config.sampling)
    wide = replace(config.sampling, batch_size=arguments.batch or SAMPLED_TOGETHER[arguments.side])
    with having_the_gpu(arguments), fast_attention(device):
        pictures, labels = generate(pipe, wide, count=arguments.samples)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    write_atomically(out / "samples.npz", lambda path: _save_samples(path, pictures))
    contact_sheet(pictures[:81], labels[:81], classes).save(out / "samples.png")
    figures = {"samples": len(pictures), "steps": wide.steps, "memory_gib": memory}
    write_json(out / "samples.json", figures)
    print(f"{name}: {len(pictures)} samples, {memory:.1f} GiB", flush=True)
    return 0


@contextmanager
def having_the_gpu(arguments: argparse.Namespace) -> Iterator[None]:
    """Wait for this call's turn, and count the memory that is taken in it alone."""
    with turn(arguments.turns):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield


STEPS = {"train": (train_one,), "sample": (sample_one,), "run": (train_one, sample_one)}


def prepare(name: str, arguments: argparse.Namespace) -> None:
    """Let everything be compiled that a variant needs, before its turn: the same with two steps and one batch."""
    side = arguments.side
    batch = arguments.batch or SAMPLED_TOGETHER[side]
    little = {"images": 2 * BATCH[side], "samples": batch, "steps": 1, "deadline": None, "turns": None}
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        short = argparse.Namespace(**vars(arguments) | little | {"work": Path(folder)})
        for step in STEPS["train" if arguments.command == "train" else "run"]:
            step(name, short)
    print(f"{name}: compiled", flush=True)


def attempt(name: str, arguments: argparse.Namespace) -> int:
    """All steps of a variant; its failure is printed and costs no other variant."""
    try:
        if arguments.turns is not None and _left(name, arguments):
            prepare(name, arguments)
        for step in STEPS[arguments.command]:
            torch._dynamo.reset()
            gc.collect()  # a compiled block refers to itself: the model before is still there
            if code := step(name, arguments):
                return code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _left(name: str, arguments: argparse.Namespace) -> bool:
    """Whether anything of the variant is still to do."""
    out = folder_of(arguments.work, arguments.side, name, arguments.seed)
    last = "model/model_index.json" if arguments.command == "train" else "samples.json"
    return not (out / last).is_file()


def _save_samples(path: Path, pictures: torch.Tensor) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, pictures=pictures.numpy())


def measure(arguments: argparse.Namespace) -> None:
    """Write the Fréchet distance of every variant that has samples to `distance.json` in its folder."""
    from diffsieve.eval.features import load_features
    from diffsieve.eval.frechet import FeatureMoments, frechet_distance

    network = load_features(weights=arguments.weights, device="cuda" if torch.cuda.is_available() else "cpu")

    def features(pictures: torch.Tensor) -> torch.Tensor:
        return torch.cat([network.features_of(part) for part in pictures.split(64)])

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        first, second = FeatureMoments(network.dimensions), FeatureMoments(network.dimensions)
        first.update(one)
        second.update(other)
        return frechet_distance(first.mean, first.covariance, second.mean, second.covariance)

    population = None
    for name in chosen(arguments):
        out = folder_of(arguments.work, arguments.side, name, arguments.seed)
        if not (out / "samples.npz").is_file() or (out / "distance.json").is_file():
            continue
        if population is None:
            population = features(load_images(arguments.data, arguments.side).pixels)
        samples = features(torch.from_numpy(np.load(out / "samples.npz", allow_pickle=False)["pictures"]))
        # what a perfect model would get for that many samples
        drawn = torch.randint(len(population), (len(samples),), generator=torch.Generator().manual_seed(0))
        value = distance(population, samples)
        figures = {
            "name": f"fd[{network.name}]",
            "value": value,
            "floor": distance(population, population[drawn]),
            "samples": len(samples),
            "population": len(population),
        }
        write_json(out / "distance.json", figures)
        print(f"{arguments.side} {name}: {figures['name']} {value:.3f}", flush=True)


def report(arguments: argparse.Namespace) -> None:
    """Collect every figure in one file, and draw distances over rates.

    Raises:
        SystemExit: not told on what was trained, or other than what the file of earlier calls says.
    """
    told = {name: getattr(arguments, name) for name in ("gpu", "python", "torch", "triton")}
    if missing := [f"--{name}" for name, value in told.items() if value is None]:
        raise SystemExit(f"report must be told on what the variants were trained: give {', '.join(missing)}")
    trained_on = {"gpu": told.pop("gpu"), "versions": told}
    target = arguments.out / "pixel_dit_study.json"
    earlier = json.loads(target.read_text()) if target.is_file() else {"sides": {}} | trained_on
    if different := [key for key, value in trained_on.items() if earlier[key] != value]:
        raise SystemExit(
            f"all rows of {target} must be trained on the same: its {different[0]} is {earlier[different[0]]}, "
            f"got {trained_on[different[0]]}"
        )
    sides = {str(side): dict(earlier["sides"].get(str(side), {})) for side in BATCH}
    for side in BATCH:
        rows = sides[str(side)]
        for name in variants(side):
            for seed in sorted({0, *_seeds(arguments.work / str(side))}):
                row = _row(side, name, folder_of(arguments.work, side, name, seed))
                if row is None:
                    continue
                if seed > 0 and name not in rows:
                    raise SystemExit(f"a row of seed 0 must be there before that of seed {seed}: {side} {name}")
                others = rows.get(name, {}).pop("other_seeds", {})
                if seed > 0:
                    others[str(seed)] = row
                elif not rows.get(name, {}).keys() - row.keys():
                    rows[name] = row
                if others:
                    rows[name]["other_seeds"] = others
        sides[str(side)] = {name: rows[name] for name in variants(side) if name in rows}
    for side, rows in sides.items():
        lines = [
            Line(name, [(row["train_images_per_s"], x) for x in found])
            for name, row in rows.items()
            if (
                found := [
                    x["distance"]["value"] for x in (row, *row.get("other_seeds", {}).values()) if "distance" in x
                ]
            )
        ]
        if lines:
            axes = (
                Axis("pictures a second in training", log=False),
                Axis("Frechet distance of the samples, a mark a seed", log=False),
            )
            chart = line_plot(
                f"Samples of {side} x {side} after the same budget of pictures", arguments.gpu, lines, *axes
            )
            picture = (arguments.charts or arguments.out) / f"pixel-dit-study-{side}.png"
            write_atomically(picture, lambda path, chart=chart: chart.save(path, format="PNG", optimize=True))
    values = {
        "commands": _commands(sides),
        **trained_on,
        "variants": {str(side): list(variants(side)) for side in BATCH},
        "sides": sides,
    }
    write_json(target, values)


def _row(side: int, name: str, out: Path) -> dict[str, Any] | None:
    """The figures of a run; None where there is none."""
    if not (out / "dit" / "log.jsonl").is_file():
        return None
    log = [json.loads(line) for line in (out / "dit" / "log.jsonl").read_text().splitlines()]
    steady = sorted(line["samples_per_second"] for line in log[len(log) // 4 :])
    rate = steady[len(steady) // 2]
    recorded = json.loads((out / "settings.json").read_text())
    row: dict[str, Any] = {
        "model": recorded["model"],
        "keys_per_query": keys_per_query(side, variants(side)[name]),
        "began_at_64": (out / "start.json").is_file(),
        "images": log[-1]["step"] * BATCH[side] * log[-1]["processes"],
        "steps": log[-1]["step"],
        "seed": recorded["seed"],
        "finished": log[-1]["progress"] >= 1,
        "train_images_per_s": rate,
        "train_tokens_per_s": rate * side**2,
        "train_memory_gib": max(line["memory_gib"] for line in log),
        "loss_last_tenth": _mean([line["losses"]["loss"] for line in log[-max(1, len(log) // 10) :]]),
    }
    for file in ("samples", "distance"):
        if (out / f"{file}.json").is_file():
            row[file] = json.loads((out / f"{file}.json").read_text())
    return row


def _commands(sides: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """What makes the figures anew, with the sizes that the runs recorded."""
    found = []
    for side, rows in sides.items():
        whole = {name: row for name, row in rows.items() if row["finished"] and "samples" in row}
        for row in list(whole.values())[:1]:
            seeds: dict[str, list[str]] = {}  # variants by seed
            for name, repeated in whole.items():
                for seed in repeated.get("other_seeds", {}):
                    seeds.setdefault(seed, []).append(name)
            which = ["", *(f' --seed {seed} --variants "{",".join(names)}"' for seed, names in sorted(seeds.items()))]
            size = (
                f"--side {side} --layers {row['model']['layers']} --images {row['images']} "
                f"--steps {row['samples']['steps']} --samples {row['samples']['samples']}"
            )
            found += [
                f"python benchmarks/pixel_dit_study.py {command} --work outputs/pixel-dit-study {size}{variants_of_it}"
                for variants_of_it in which
                for command in ("run", "measure")
            ]
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def folder_of(work: Path, side: int, name: str, seed: int) -> Path:
    slug = "".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-")
    return work / str(side) / (slug if seed == 0 else f"{slug}{SEED}{seed}")


def _seeds(folder: Path) -> list[int]:
    """The seeds that runs in the folder of a size were made with, but for 0."""
    return [int(path.name.rpartition(SEED)[2]) for path in folder.glob(f"*{SEED}*")]


def chosen(arguments: argparse.Namespace) -> list[str]:
    names = arguments.variants.split(",") if arguments.variants else list(variants(arguments.side))
    unknown = [name for name in names if name not in variants(arguments.side)]
    if unknown:
        raise SystemExit(f"variants must be among: {', '.join(variants(arguments.side))}; got {unknown[0]}")
    number, count = (int(part) for part in arguments.shard.split("/"))
    return names[number::count]


def run_all(arguments: argparse.Namespace) -> int:
    """Each variant of this shard; returns 1 when one failed, 3 when something is left to do."""
    names = chosen(arguments)
    if names == [WITHOUT_WEIGHTS]:
        drop_weights()
        print(f"{WITHOUT_WEIGHTS}: relative error {check_without_weights():.2e}", flush=True)
    arguments.deadline = None if arguments.max_seconds is None else time.monotonic() + arguments.max_seconds
    left = failed = False
    for name in names:
        seconds = math.inf if arguments.deadline is None else arguments.deadline - time.monotonic()
        if seconds < SHORTEST:
            left = True
            break
        if name == WITHOUT_WEIGHTS and len(names) > 1:  # its kernels are changed for a whole process
            words = [sys.executable, __file__, *sys.argv[1:], "--variants", name, "--shard", "0/1"]
            if arguments.deadline is not None:
                words += ["--max-seconds", f"{seconds:.0f}"]
            code = subprocess.run(words, check=False).returncode
        else:
            code = attempt(name, arguments)
        if code == PAUSED:
            left = True
        elif code:
            print(f"{name}: failed with exit code {code}", flush=True)
            failed = True
    return 1 if failed else PAUSED if left else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "train", "sample", "measure", "report"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", type=Path, default=Path(".data/emoji"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--charts", type=Path, help="folder of the report's charts; default that of --out")
    for name in ("gpu", "python", "torch", "triton"):
        parser.add_argument(f"--{name}", help="for the report: on what the variants were trained")
    parser.add_argument("--side", type=int, choices=sorted(BATCH), default=64)
    parser.add_argument("--variants", help="names, joined by commas; default all")
    parser.add_argument("--images", type=int, help="budget of training pictures")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=20, help="of sampling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, help="pictures sampled together")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument(
        "--turns", type=Path, metavar="FILE", help="take turns at the GPU with other calls of this file"
    )
    parser.add_argument("--weights", type=Path, help="file of the feature network, where it is not in the cache")
    arguments = parser.parse_args()
    if arguments.command in STEPS:
        raise SystemExit(run_all(arguments))
    {"measure": measure, "report": report}[arguments.command](arguments)


if __name__ == "__main__":
    main()
