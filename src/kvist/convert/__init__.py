"""Converts checkpoints between numbers of KV heads: from many to few, and back; trains and measures what was made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvist.convert.gqa_config import GqaConfig
from kvist.convert.uptrain_config import UptrainConfig

if TYPE_CHECKING:
    from kvist.convert.conversion import expand, to_gqa
    from kvist.convert.record import Conversion
    from kvist.convert.report import conversion_report
    from kvist.convert.report_config import ReportConfig
    from kvist.convert.uptrain import Uptraining
    from kvist.convert.uptrain_result import UptrainResult

__all__ = [
    "Conversion",
    "GqaConfig",
    "ReportConfig",
    "UptrainConfig",
    "UptrainResult",
    "Uptraining",
    "conversion_report",
    "expand",
    "to_gqa",
]

# They need torch, some transformers too; whoever only parses a command line should not wait for it.
_MODULES = {
    "Conversion": "record",
    "ReportConfig": "report_config",
    "UptrainResult": "uptrain_result",
    "Uptraining": "uptrain",
    "conversion_report": "report",
    "expand": "conversion",
    "to_gqa": "conversion",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f"kvist.convert.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
