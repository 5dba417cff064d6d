"""Studies of block selection on a model's own attention: captured tensors, recall, fidelity of variants."""

from .capture import CaptureConfig, capture
from .captured import Captured, captured_files, read_captured
from .clips import StudyConfig, study_clips
from .recall import RecallConfig, study_recall
from .report import write_report
from .variants import SUITES, VARIANTS, Variant

__all__ = [
    "SUITES",
    "VARIANTS",
    "CaptureConfig",
    "Captured",
    "RecallConfig",
    "StudyConfig",
    "Variant",
    "capture",
    "captured_files",
    "read_captured",
    "study_clips",
    "study_recall",
    "write_report",
]
