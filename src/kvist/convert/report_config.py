"""What a report measures."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.checks import check_integer
from kvist.config import WEIGHTS_FORMATS, check_format
from kvist.errors import OptionError
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.evaluation import EXACT
from kvist.kv_format import LayerFormats

DEFAULT_CONTEXTS = (128, 1024, 4096, 7000)


_BF16 = LayerFormats.parse("bf16")


@dataclass(frozen=True)
class ReportConfig:
    """How much of everything.

    Args:
        window, windows: of the text, as in `EvalConfig`.
        contexts: tokens in the cache, at which decoding is timed.
        new_tokens: that are timed in a run.
        repetitions: of a timing that are to count.
        kv_format: of the cache while it is timed.
        weights_format: of the weights while it is timed; quality is always judged in fp32.

    Raises:
        OptionError: a value is out of range.
    """

    window: int = 1024
    windows: int = 8
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    new_tokens: int = 32
    repetitions: int = 3
    kv_format: LayerFormats = _BF16
    weights_format: str = "bf16"

    def __post_init__(self) -> None:
        self.evaluation()
        if not self.contexts:
            raise OptionError("there is no context to time: name one, like 1024")
        for context in self.contexts:
            check_integer("contexts", context, 1)
        check_integer("new_tokens", self.new_tokens, 1)
        check_integer("repetitions", self.repetitions, 1)
        check_format("weights_format", self.weights_format, WEIGHTS_FORMATS)

    def evaluation(self) -> EvalConfig:
        """How both models predict the text: an exact cache, so that they alone differ."""
        return EvalConfig((EXACT,), "fp32", self.window, self.windows)
