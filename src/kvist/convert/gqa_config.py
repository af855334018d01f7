"""How KV heads are merged."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.checks import check_integer
from kvist.config import check_format
from kvist.errors import OptionError

METHODS = ("first", "mean", "aligned", "fitted")
"""The ways to merge KV heads, from the simplest to the one that keeps most."""

# Those that look at what a text makes of the layers.
CALIBRATED = ("aligned", "fitted")

_LEAST_WINDOW = 2


@dataclass(frozen=True)
class GqaConfig:
    """How KV heads are merged.

    Args:
        method: one of `METHODS`.
        window: tokens of the calibration text that a layer sees in one sequence; a BOS token counts.
        windows: how many follow one another from the text's beginning on.

    Raises:
        OptionError: a value is out of range.
    """

    method: str = "mean"
    window: int = 512
    windows: int = 8

    def __post_init__(self) -> None:
        check_format("method", self.method, METHODS)
        check_integer("window", self.window, _LEAST_WINDOW)
        check_integer("windows", self.windows, 1)

    @property
    def is_calibrated(self) -> bool:
        return self.method in CALIBRATED

    def check_text(self, is_given: bool) -> None:
        """Raise `OptionError` unless there is a calibration text where the method needs one, and none elsewhere."""
        if self.is_calibrated and not is_given:
            raise OptionError(
                f"method {self.method} looks at the layers on a text: give --text FILE, of some thousand words, or "
                "take the method mean"
            )
        if is_given and not self.is_calibrated:
            raise OptionError(f"method {self.method} looks at no text: leave it out, or take {' or '.join(CALIBRATED)}")
