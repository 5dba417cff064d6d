"""Dense-against-sparse comparisons: the same noise twice, metrics on raw frames, clips, pictures and a report."""

from .config import CompareConfig, GenerateConfig, RunConfig
from .generate import generate
from .methods import METHODS
from .progress import Progress, ProgressCallback
from .run import compare

__all__ = [
    "METHODS",
    "CompareConfig",
    "GenerateConfig",
    "Progress",
    "ProgressCallback",
    "RunConfig",
    "compare",
    "generate",
]
