"""Teacher and student, as transformers runs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvist.convert.uptrain_compute import Autocast
from kvist.convert.uptrain_folder import ModelFolder, is_trained, transformers_name
from kvist.errors import ModelFileError, OptionError, shown


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
        """Let gradients reach what is to be trained, and nothing else; returns it by name.

        All weights get memory of their own, since they may be mapped from files that the training replaces.
        """
        chosen = {}
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(is_trained(name, train))
            if parameter.requires_grad:
                chosen[name] = parameter
        return chosen


def load_model(folder: ModelFolder, dtype: torch.dtype, autocast: Autocast) -> Trained:
    """A model with its weights in `dtype`, in evaluation mode and without gradients.

    It is the text model alone, also where the files hold others beside it. Its weights may be mapped from them.

    Raises:
        OptionError: transformers is not installed.
        ModelFileError: it does not load.
    """
    transformers = import_transformers()
    source = folder.source
    weights = {transformers_name(name): source.checkpoint.read(name, dtype) for name in source.names.values()}
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(str(folder.path), local_files_only=True)
            config = config.get_text_config(decoder=True)
            config.tie_word_embeddings = folder.config.tie_embeddings
            model, found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelFileError(
            f"{folder.path} does not load in transformers: {' '.join(str(error).split())[:300]}"
        ) from error
    # What is missing would hold random numbers, and be trained from them.
    if differing := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
        raise ModelFileError(
            f"{folder.path} does not load in transformers: it differs in {shown(differing[0])}: fetch it again"
        )
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
