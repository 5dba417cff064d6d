"""Benchmarks: operations registered once, each checked against fp64 before it gets a figure."""

from .config import BenchConfig
from .operations import OPERATIONS
from .runner import plan, run_bench

__all__ = ["OPERATIONS", "BenchConfig", "plan", "run_bench"]
