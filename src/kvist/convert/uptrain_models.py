"""Teacher and student, as transformers runs them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kvist.config import ModelConfig
from kvist.errors import ModelFileError, ModelNotFoundError, OptionError
from kvist.loading.prepared import prepared_copy
from kvist.loading.progress import Progress
from kvist.loading.resolve import resolve
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.tokenizer import Tokenizer
from kvist.loading.untrusted_file import errors_about, read_json
from kvist.models.registry import decoder_config

Autocast = Callable[[], AbstractContextManager[object]]

# A product of this size is timed in both dtypes: 512 rows through a matrix of a small model.
_PROBE_ROWS, _PROBE_COLUMNS, _PROBE_REPETITIONS = 512, 1024, 3


@dataclass(frozen=True)
class Trained:
    """A model of transformers, in the parts that a training needs.

    Attributes:
        model: the whole of it.
        vocab_size: `V`.
        attention_modules: of its layers, in order.
        autocast: the context in which it computes.
        softcap: of its logits, as Gemma has it; None for none.
    """

    model: Any
    vocab_size: int
    attention_modules: tuple[torch.nn.Module, ...]
    autocast: Autocast
    softcap: float | None

    @classmethod
    def of(cls, model: Any, autocast: Autocast) -> Trained:
        config = model.config
        layers = model.model.layers
        return cls(
            model,
            config.vocab_size,
            tuple(layer.self_attn for layer in layers),
            autocast,
            getattr(config, "final_logit_softcapping", None),
        )

    def hidden_states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The last hidden states `[B, L, E]` of sequences `[B, L]`."""
        with self.autocast():
            hidden: torch.Tensor = self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, V]` of hidden states `[n, E]`."""
        with self.autocast():
            logits: torch.Tensor = self.model.lm_head(hidden)
        return logits if self.softcap is None else self.softcap * (logits.float() / self.softcap).tanh()

    def choose_trained(self, train: str) -> dict[str, torch.nn.Parameter]:
        """Let gradients reach what is to be trained, and nothing else; returns it by name."""
        chosen = {}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(train == "all" or ".self_attn." in name)
            if parameter.requires_grad:
                chosen[name] = parameter
        return chosen


@dataclass(frozen=True)
class ModelFolder:
    """A model's files in Hugging Face format, looked at before anything is loaded.

    Attributes:
        path: the folder; the prepared copy of a GGUF file.
        name: what the model goes by.
        config: of the model.
        tokenizer: of the model.
    """

    path: Path
    name: str
    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def find(cls, model: str, progress: Progress) -> ModelFolder:
        """The folder of a model by path, name or Hub id; a GGUF file is de-quantised.

        Raises:
            KvistError: it is not there, damaged, or of a family that is not run.
        """
        source = resolve(model, progress)
        path = prepared_copy(source.path, "fp32", progress) if source.is_gguf else source.path
        with errors_about(path / "config.json"):
            config = decoder_config(read_json(path / "config.json"))
        SafetensorsCheckpoint(path)  # refuses pickles, and what is damaged, in words of its own
        return cls(path, source.name, config, Tokenizer.from_directory(path))

    @classmethod
    def student(cls, path: Path) -> ModelFolder:
        """The folder of a model that is to be trained in place.

        Raises:
            ModelNotFoundError: there is none.
        """
        if not path.is_dir():
            raise ModelNotFoundError(
                f"there is no folder {path}: make one with `kvist convert gqa SRC {path} --kv-heads N` first"
            )
        return cls.find(str(path.absolute()), lambda stage, done, total: None)


def load_model(folder: Path, dtype: torch.dtype, autocast: Autocast) -> Trained:
    """A model with its weights in `dtype`, in evaluation mode and without gradients.

    Raises:
        OptionError: transformers is not installed.
        ModelFileError: it does not load.
    """
    transformers = import_transformers()
    try:
        with _quiet(transformers):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelFileError(f"{folder} does not load in transformers: {' '.join(str(error).split())[:300]}") from error
    return Trained.of(model.eval().requires_grad_(False), autocast)


def import_transformers() -> Any:
    """The library; `OptionError` where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise OptionError("training needs transformers, which is not installed: pip install 'kvist[convert]'") from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bars of the library's own: ours says how far everything is."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def resolved_compute(compute: str) -> str:
    """`fp32` or `bf16`: for `auto` the faster of both here, by the time of a product."""
    if compute != "auto":
        return compute
    return "bf16" if _product_seconds(torch.bfloat16) < _product_seconds(torch.float32) else "fp32"


def autocast_of(compute: str) -> Autocast:
    """The context in which the forward pass runs."""
    return partial(torch.autocast, "cpu", torch.bfloat16) if compute == "bf16" else nullcontext


def _product_seconds(dtype: torch.dtype) -> float:
    rows = torch.ones(_PROBE_ROWS, _PROBE_COLUMNS, dtype=dtype)
    matrix = torch.ones(_PROBE_COLUMNS, _PROBE_COLUMNS, dtype=dtype)
    functional.linear(rows, matrix)
    found = []
    for _ in range(_PROBE_REPETITIONS):
        began_s = time.perf_counter()
        functional.linear(rows, matrix)
        found.append(time.perf_counter() - began_s)
    return min(found)
