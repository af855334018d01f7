"""The exceptions that users see: one per kind of thing a person can act on.

Every message is one line that says what was asked, what is possible and what to change. The command line prints the
message alone and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_SHOWN = 80


class KvistError(Exception):
    """Base of every error that Kvist raises on purpose."""


class OptionError(KvistError, ValueError):
    """An option or parameter has a value that cannot be honoured."""


class ModelNotFoundError(KvistError):
    """No model goes by this name, path or Hub id."""


class ModelFileError(KvistError):
    """A model file is missing, truncated, contradictory or of a kind that is not read."""


class UnsupportedModelError(KvistError):
    """The files are sound, but describe an architecture or a feature that Kvist does not run."""


class DownloadError(KvistError):
    """A model could not be fetched; nothing half-made was left behind."""


class PromptError(KvistError, ValueError):
    """The prompt cannot be run: empty, too long for the context, or without the template it needs."""


class ContextFullError(PromptError):
    """The prompt, with the history before it, is too long for the model's context."""


class CacheFullError(KvistError):
    """The request cannot fit into the memory set aside for the KV cache."""


class StateError(KvistError):
    """An object is used in a way that its state does not allow: it is closed, has ended, or another thread uses it."""


class SequenceError(KvistError, LookupError):
    """A sequence of the KV cache is not open any more, or has changed under the view of a step."""


class ReservationError(KvistError, ValueError):
    """A step has more tokens than room was reserved for."""


class RewindError(KvistError, ValueError):
    """A sequence cannot be rewound to a position that it does not have."""


class NumericsError(KvistError):
    """The model produced logits that are not numbers."""


class NativeError(KvistError):
    """The native library is missing, or was asked for an instruction set that it cannot provide."""


class SameAnswerWarning(RuntimeWarning):
    """The logits of a token depend on how its context was computed, in their last bits: promise 1 does not hold."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause naming the nearest known name, or all of them: `did you mean 'bf16'? known: bf16, fp32`."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    listed = f"known: {', '.join(names)}"
    return f"did you mean '{near[0]}'? {listed}" if near else listed


def shown(value: object) -> str:
    """A value from a file for a message: quoted where it is text, on one line, and not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
