"""What a finished generation looks like: the statistics under the text, and the object of `--json`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvist.memory import binary_size

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from kvist.llm import LLM
    from kvist.results import Completion, TextDelta

_LEAST_WIDTH = 40
_UNBOUNDED_WIDTH = 10_000
_MOST_NAMED = 3


@dataclass(frozen=True)
class Report:
    """What `kvist run --json` prints: these keys, in this order."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    kv_format: str
    kv_bytes: int
    kv_bytes_per_token: int
    weights_format: str
    weights_bytes: int
    bf16_matrices: tuple[str, ...]
    kernel: str

    @classmethod
    def of(cls, llm: LLM, completion: Completion) -> Report:
        timings = completion.timings
        return cls(
            text=completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cached_tokens=completion.cached_tokens,
            ttft_ms=round(timings.ttft_ms, 2),
            prefill_tokens_per_s=_rounded(timings.prefill_tokens_per_s),
            decode_tokens_per_s=_rounded(timings.decode_tokens_per_s),
            kv_format=llm.kv_format,
            kv_bytes=completion.kv_bytes,
            kv_bytes_per_token=completion.kv_bytes_per_token,
            weights_format=llm.weights_format,
            weights_bytes=llm.weights_bytes,
            bf16_matrices=llm.bf16_matrices,
            kernel=llm.kernel,
        )

    def json(self) -> str:
        """One line, in UTF-8 as it is."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    def statistics(self) -> dict[str, str]:
        """The same without the text, for a person: a few words to a line."""
        speeds = [f"first token after {_milliseconds(self.ttft_ms)}"]
        for name, speed in (("prefill", self.prefill_tokens_per_s), ("decode", self.decode_tokens_per_s)):
            if speed is not None:
                speeds.append(f"{name} {speed:,.1f} tokens/s")
        tokens = (
            f"{self.prompt_tokens:,} prompt ({self.cached_tokens:,} cached) + {self.completion_tokens:,} completion"
        )
        return {
            "tokens": tokens + (", cut off at the limit" if self.finish_reason == "length" else ""),
            "speed": ", ".join(speeds),
            "cache": f"{self.kv_format}, {binary_size(self.kv_bytes)}, {self.kv_bytes_per_token:,} bytes per token",
            "weights": ", ".join(
                [self.weights_format, binary_size(self.weights_bytes), *in_bf16(self.bf16_matrices), *self._advice()]
            ),
            "kernel": self.kernel,
        }

    def _advice(self) -> list[str]:
        """What there is to say of weights that need not be read in full."""
        plain = self.weights_format in ("bf16", "fp32")
        return ["--weights-format int8 decodes faster and costs little quality"] if plain else []


def in_bf16(matrices: Sequence[str]) -> list[str]:
    """What there is to say of matrices that the format does not fit, as a list of one; an empty one without such."""
    if not matrices:
        return []
    named = ", ".join(matrices[:_MOST_NAMED]) + (" ..." if len(matrices) > _MOST_NAMED else "")
    count = f"{len(matrices)} matri{'x' if len(matrices) == 1 else 'ces'}"
    return [f"{count} in bf16, whose columns are no multiple of 32 ({named})"]


def written(deltas: Iterable[TextDelta]) -> Generator[TextDelta, None, None]:
    """Pass the deltas on and write their text to standard output as it comes, with a line break after the last."""
    text = ""
    try:
        for delta in deltas:
            if delta.text:
                text = delta.text
                sys.stdout.write(text)
                sys.stdout.flush()
            yield delta
    finally:
        if text and not text.endswith("\n"):
            print(flush=True)


def print_statistics(statistics: dict[str, str]) -> None:
    """A block of labelled lines on standard error, under the text but out of the way of a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True, width=_UNBOUNDED_WIDTH)
    width = max(map(len, statistics))
    for label, value in statistics.items():
        console.print(Text.assemble((f"{label:<{width}}", "dim"), "  ", value))


def table_console() -> RichConsole:
    """Standard output for tables: as wide as the terminal, and without bounds where a program reads it."""
    from rich.console import Console

    return Console(highlight=False, width=screen_width() if sys.stdout.isatty() else _UNBOUNDED_WIDTH)


def screen_width() -> int:
    """Columns of the terminal, or as many as a table needs to be read where it has fewer, or claims to."""
    return max(shutil.get_terminal_size().columns, _LEAST_WIDTH)


def print_note(message: str) -> None:
    """One line on standard error that is worth knowing and no error."""
    print("note:", message, file=sys.stderr)


def print_error(message: str) -> None:
    """One line on standard error, whatever the message holds."""
    print("error:", " ".join(message.split()), file=sys.stderr)


def _rounded(speed: float | None) -> float | None:
    return None if speed is None else round(speed, 2)


def _milliseconds(ttft_ms: float) -> str:
    return f"{ttft_ms:,.0f} ms" if ttft_ms < 10_000 else f"{ttft_ms / 1000:.1f} s"
