"""VBench: the videos of its prompt suite under its names, its scores from its own environment, a table."""

from .generate import VBenchConfig, generate_suite
from .score import ScoreConfig, score_videos
from .suite import DIMENSIONS, Suite, load_suite
from .table import score_table

__all__ = [
    "DIMENSIONS",
    "ScoreConfig",
    "Suite",
    "VBenchConfig",
    "generate_suite",
    "load_suite",
    "score_table",
    "score_videos",
]
