"""How far the forms of attention that the pixel DiT's study trains are from dense attention, in a trained model.

    PYTHONPATH=. python benchmarks/llsa_forms.py --data .data/emoji --out benchmarks/results/cpu

Takes queries, keys and values of every layer of mini-pixel-dit, fp32, for pictures of the set at three shares of noise,
and computes each form with blocks of 16 in Hilbert order. Relative error of the output over all heads, mean over
layers and pictures. The model was trained with LLSA of two levels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from diffsieve import load_pipeline
from diffsieve.compare.report import versions
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention
from diffsieve.pipelines.training.checkpoint import write_json
from diffsieve.pipelines.training.pixel_dit.images import load_images
from llsa_without_weights import BLOCK, TOPK, definition

SIDE = 128
FORMS: dict[str, dict[str, Any]] = {
    f"{name}{levels} level{'s' * (levels > 1)}": options | {"levels": levels}
    for levels in (1, 2)
    for name, options in (
        ("llsa, ", {}),
        ("llsa disjoint, ", {"disjoint": True}),
        ("llsa without enrichment, ", {"enrich": False}),
    )
} | {"top-k of 320 keys, 1 level": {"levels": 1, "enrich": False, "topk": 20}}


def projections(model: Any, pixels: Tensor, share: float, label: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(query, key, value) of each layer for a picture (3, S, S) in [-1, 1] with that share of noise."""
    found = []

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        found.append((query, key, value))
        return llsa_attention(query, key, value, **options)

    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed)) * SIDE / 64
    noisy = (1 - share) * pixels + share * noise
    with mock.patch("diffsieve.pipelines.pixel_dit.attention.llsa_attention", record):
        model(noisy[None], torch.tensor([1000 * share]), torch.tensor([label]), return_dict=False)
    return found


def errors(query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Relative error of the output of each form."""
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    outputs = {
        name: llsa_attention(query, key, value, **{"block_size": BLOCK, "topk": TOPK} | options)
        for name, options in FORMS.items()
    }
    for levels in (1, 2):
        lists = hierarchical_topk(query, key, block_size=BLOCK, topk=TOPK, levels=levels)
        heads = []
        for head in range(query.shape[1]):  # a head's mask is L x L and more
            one = slice(head, head + 1)
            of_head = [x[:, one] for x in (query, key, value)]
            heads.append(definition(*of_head, [x[:, one] for x in lists], weighted=False))
        outputs[f"llsa without weights, {levels} level{'s' * (levels > 1)}"] = torch.cat(heads, 1)
    return {name: float((x - dense).norm() / dense.norm()) for name, x in outputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".data/emoji"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    arguments = parser.parse_args()
    model = load_pipeline("mini-pixel-dit").transformer.float().eval()
    images = load_images(arguments.data, SIDE)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for seed, share in enumerate((0.3, 0.6, 0.9)):
        number = int(chosen[seed])
        pixels = images.pixels[number].float() / 127.5 - 1
        with torch.no_grad():
            layers = projections(model, pixels, share, int(images.labels[number]), seed)
            if len(layers) != len(model.blocks):
                raise SystemExit(f"every layer must run LLSA, got {len(layers)}")
            for layer, tensors in enumerate(layers):
                rows.append({"noise": share, "layer": layer, "errors": errors(*tensors)})
                print(rows[-1], flush=True)
    names = rows[0]["errors"]
    means = {name: sum(row["errors"][name] for row in rows) / len(rows) for name in names}
    command = "PYTHONPATH=. python benchmarks/llsa_forms.py"
    values = {"command": command, "versions": versions(), "mean_errors": means, "rows": rows}
    write_json(arguments.out / "llsa_forms.json", values)


if __name__ == "__main__":
    main()
