"""The model twice: exact, and as it is tested."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.config import CacheConfig
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.evaluation import EXACT, check_window
from kvist.kernels.key_statics import KeyStatics
from kvist.loading import LoadedModel, load
from kvist.loading.progress import Progress, no_progress


@dataclass(frozen=True)
class EvaluatedModel:
    """What an evaluation runs.

    Attributes:
        reference: the model in fp32.
        tested: the model in what the formats are tested with; the same object where that is fp32.
    """

    reference: LoadedModel
    tested: LoadedModel

    @classmethod
    def load(
        cls, model: str | os.PathLike[str], config: EvalConfig, *, progress: Progress | None = None
    ) -> EvaluatedModel:
        """Load a model; `model`, `progress` and what is raised are those of `kvist.loading.load`.

        What the caches would refuse is refused here, before the model is loaded again or statics are computed.

        Raises:
            OptionError: the model's layers cannot take a format.
            CacheFullError: the machine lacks the memory for the cache of a window.
        """
        progress = progress or no_progress
        reference = load(model, "fp32", progress=progress)
        for kv_format in (*config.formats, EXACT):
            check_window(reference.config.layers, kv_format, config.window, CacheConfig.max_step_tokens)
        weights_format = config.weights_format
        tested = reference if weights_format == "fp32" else load(model, weights_format, progress=progress)
        return cls(reference, tested)

    def key_statics(self, config: EvalConfig, *, progress: Progress | None = None) -> Sequence[KeyStatics] | None:
        """For each layer, what its quantised keys are coded with; None where no format has such."""
        if any(kv_format.quantised_keys for kv_format in config.formats):
            return self.tested.key_statics(progress)
        return None
