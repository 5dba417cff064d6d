"""What a mini-wan draws on held-out prompts at one clip size, by the judge, with a contact sheet.

    python benchmarks/mini_wan_quality.py --sprites .data/sprites.npz --frames 41 --height 320 --width 320 --out FOLDER

`--model` takes any exported pipeline; default: the embedded one. The training measures every model it exports at the
usual size in the same way. Writes `mini_wan_quality_<frames>x<height>x<width>.json` and `.png`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from diffsieve.pipelines.loading import load_pipeline
from diffsieve.pipelines.training.checkpoint import write_json
from diffsieve.pipelines.training.config import ClipSize, EvaluationConfig
from diffsieve.pipelines.training.evaluate import evaluate_pipeline
from diffsieve.pipelines.training.sheets import save_sheet
from diffsieve.pipelines.training.sprites import load_sprites


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-wan")
    parser.add_argument("--sprites", type=Path, required=True, help="file of `diffsieve data sprites`")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="prompts of a call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pipe = load_pipeline(options.model, device=options.device)
    size = ClipSize(options.frames, options.height, options.width, options.batch)
    config = EvaluationConfig(prompts=options.prompts, size=size)
    figures, clips, specs = evaluate_pipeline(
        pipe, load_sprites(options.sprites), config, report=lambda done, total: print(f"{done} of {total}", flush=True)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"mini_wan_quality_{options.frames}x{options.height}x{options.width}"
    write_json(options.out / f"{name}.json", {"command": " ".join(["python", *sys.argv[:-2]])} | figures)
    save_sheet(options.out / f"{name}.png", 2 * clips - 1, specs.captions()[: len(clips)])
    print({key: figures[key] for key in ("subject", "motion", "colour")})


if __name__ == "__main__":
    main()
