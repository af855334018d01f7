"""What is evaluated, and on how much text."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.checks import check_integer
from kvist.config import WEIGHTS_FORMATS, check_format
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats, check_distinct

LEAST_WINDOW = 2
"""A token, and one to predict from it."""


@dataclass(frozen=True)
class EvalConfig:
    """Which formats, on how much text.

    Args:
        formats: of the cache, each once.
        weights_format: of the model that the formats are tested with; it decides the arithmetic too. The reference's is
            fp32.
        window: tokens that are predicted in one sequence; a BOS token counts.
        windows: how many follow one another from the text's beginning on.
        every: positions from one that is scored to the next.
        pytorch: whether each format is evaluated through the kernels' plain twins in PyTorch too.

    Raises:
        OptionError: a value is out of range, or a format is there twice or not at all.
    """

    formats: tuple[LayerFormats, ...]
    weights_format: str = "fp32"
    window: int = 2048
    windows: int = 8
    every: int = 1
    pytorch: bool = False

    def __post_init__(self) -> None:
        check_format("weights_format", self.weights_format, WEIGHTS_FORMATS)
        check_integer("window", self.window, LEAST_WINDOW)
        check_integer("windows", self.windows, 1)
        check_integer("every", self.every, 1, self.window, note=", the window")
        if not self.formats:
            raise OptionError("there is no kv_format to evaluate: name one, like int8")
        check_distinct(self.formats)
