"""Sprites for tests: eight plain shapes, drawn here, so that clips can be rendered without a download."""

import torch

from diffsieve.pipelines.training.sprites import Sprites


def shape_sprites(sprite_px: int = 48) -> Sprites:
    """Eight shapes in two colours each, with soft edges and a transparent margin."""
    line = ((torch.arange(sprite_px) + 0.5) / sprite_px * 2 - 1) * 1.1
    y, x = torch.meshgrid(line, line, indexing="ij")
    radius = torch.hypot(x, y)
    square = torch.maximum(x.abs(), y.abs())
    # Signed distances to the outline, negative inside.
    outlines = {
        "disc": radius - 0.95,
        "square": square - 0.9,
        "ring": (radius - 0.7).abs() - 0.25,
        "cross": torch.minimum(
            torch.maximum(x.abs() - 0.3, square - 0.95), torch.maximum(y.abs() - 0.3, square - 0.95)
        ),
        "diamond": (x.abs() + y.abs()) - 0.95,
        "plank": torch.maximum(x.abs() - 0.95, y.abs() - 0.45),
        "post": torch.maximum(x.abs() - 0.45, y.abs() - 0.95),
        "arch": torch.maximum(radius - 0.95, y - 0.1),
    }
    colours = torch.tensor(
        [
            [[0.95, 0.10, 0.30], [1.00, 1.00, 1.00]],
            [[0.05, 0.05, 0.10], [1.00, 0.60, 0.10]],
            [[1.00, 0.95, 0.10], [0.10, 0.05, 0.10]],
            [[1.00, 1.00, 1.00], [0.90, 0.10, 0.10]],
            [[0.10, 0.90, 0.30], [0.10, 0.10, 0.50]],
            [[0.45, 0.20, 0.05], [1.00, 0.90, 0.60]],
            [[0.05, 0.25, 0.95], [1.00, 1.00, 0.80]],
            [[1.00, 0.50, 0.05], [0.20, 0.00, 0.30]],
        ]
    )
    planes = []
    for i, outline in enumerate(outlines.values()):
        alpha = (0.5 - outline * sprite_px / 2.2).clamp(0, 1)
        # The left part in the second colour: no shape looks like its own mirror image.
        first = (x > -0.2).float()
        rgb = colours[i, 0][:, None, None] * first + colours[i, 1][:, None, None] * (1 - first)
        planes.append(torch.cat([rgb * alpha, alpha[None]]))
    return Sprites(torch.stack(planes), tuple(outlines))
