"""Run open-weight language models with the KV cache as a first-class object.

from kvist import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("A twig is", SamplingParams(max_tokens=20)).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvist.threads import wait_briefly

if TYPE_CHECKING:
    from kvist.config import SamplingParams
    from kvist.errors import KvistError
    from kvist.llm import LLM
    from kvist.loading.chat_template import Message
    from kvist.results import Completion, TextDelta, Timings, TokenLogprob
    from kvist.session import Session

    __version__: str

__all__ = [
    "LLM",
    "Completion",
    "KvistError",
    "Message",
    "SamplingParams",
    "Session",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "__version__",
]

_MODULES = {
    "LLM": "kvist.llm",
    "Completion": "kvist.results",
    "KvistError": "kvist.errors",
    "Message": "kvist.loading.chat_template",
    "SamplingParams": "kvist.config",
    "Session": "kvist.session",
    "TextDelta": "kvist.results",
    "Timings": "kvist.results",
    "TokenLogprob": "kvist.results",
}


# Names are loaded on first use: `import kvist` alone must not wait for torch.
def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvist")
    if name in _MODULES:
        wait_briefly()
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
