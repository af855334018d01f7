"""The model twice: exact, and as it is tested."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.evaluate.eval_config import EvalConfig
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

        Raises:
            OptionError: a format names layers that the model does not have.
        """
        progress = progress or no_progress
        reference = load(model, "fp32", progress=progress)
        for kv_format in config.formats:
            kv_format.of(reference.config.num_layers)
        tested = reference if config.compute == "fp32" else load(model, config.compute, progress=progress)
        return cls(reference, tested)

    def key_statics(self, config: EvalConfig, *, progress: Progress | None = None) -> Sequence[KeyStatics] | None:
        """For each layer, what its quantised keys are coded with; None where no format has such."""
        if any(kv_format.quantised_keys for kv_format in config.formats):
            return self.tested.key_statics(progress)
        return None
