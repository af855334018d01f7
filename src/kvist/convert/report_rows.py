"""The figures of a report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from kvist.convert.record import ConversionRecord
from kvist.convert.report_config import ReportConfig
from kvist.convert.uptrain_curve import Curve

_MOST_PRINTED = 200


def printable(text: str) -> str:
    """A text from a file for a report, which is printed too: on one line, no control characters, and not long."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:_MOST_PRINTED])
    return plain if len(text) <= _MOST_PRINTED else f"{plain}..."


@dataclass(frozen=True)
class Prediction:
    """How well something predicts the text.

    Attributes:
        name: of it.
        loss, perplexity: nats per token, and e to that.
        kl_mean: KL(source || it), nats per token; None where that was not compared.
        top1_agreement: how often its likeliest token is the source's; None too.
    """

    name: str
    loss: float
    perplexity: float
    kl_mean: float | None = None
    top1_agreement: float | None = None

    @classmethod
    def of_loss(cls, name: str, loss: float) -> Prediction:
        return cls(name, loss, math.exp(loss))


@dataclass(frozen=True)
class CacheRow:
    """What a sequence takes in the cache.

    Attributes:
        context: its tokens.
        source_bytes, converted_bytes: by the formula that the cache allocates by.
        source_measured_bytes, converted_measured_bytes: by how much the process grew; None where it was not looked at.
    """

    context: int
    source_bytes: int
    converted_bytes: int
    source_measured_bytes: int | None = None
    converted_measured_bytes: int | None = None


@dataclass(frozen=True)
class SpeedRow:
    """How fast a sequence is decoded; both models in turn, in one run.

    Attributes:
        context: tokens in the cache.
        source_tokens_per_s, converted_tokens_per_s: that were measured.
        ratio: of the second to the first.
        bytes_ratio: of the bytes that a step of the source and of the converted model must read: what the ratio would
            be if nothing but reading took time.
        is_steady: whether the read bandwidth stayed the same around enough repetitions.
    """

    context: int
    source_tokens_per_s: float
    converted_tokens_per_s: float
    ratio: float
    bytes_ratio: float
    is_steady: bool


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion came to.

    Attributes:
        source, converted: names of the models.
        text: the name of the one that was predicted.
        num_heads, source_kv_heads, converted_kv_heads: of a layer.
        positions: of the text that were scored.
        predictions: the source's first, then the converted model's, and what they are measured by.
        cache, speeds: a row for each context.
        config: what was asked for.
        record: what `conversion.json` says.
        is_source: whether the converted model may have been made from the source, by what is said there.
        curve: of the last training; None where there was none.
        machine: what it was measured on, in a line.
    """

    source: str
    converted: str
    text: str
    num_heads: int
    source_kv_heads: int
    converted_kv_heads: int
    positions: int
    predictions: tuple[Prediction, ...]
    cache: tuple[CacheRow, ...]
    speeds: tuple[SpeedRow, ...]
    config: ReportConfig
    record: ConversionRecord
    is_source: bool
    curve: Curve | None
    machine: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of what predicts the text. Those of the models say which is which, since both may go by one name."""
        source, converted, *others = self.predictions
        return f"source: {source.name}", f"converted: {converted.name}", *(other.name for other in others)

    def figures(self) -> dict[str, object]:
        """All of it as plain values."""
        fields = {name: value for name, value in vars(self).items() if name not in ("curve", "config")}
        rows = {name: [asdict(row) for row in fields[name]] for name in ("predictions", "cache", "speeds")}
        settings = vars(self.config) | {"kv_format": str(self.config.kv_format)}
        return fields | rows | {"record": self.record.fields, "settings": settings}


def kv_heads(number: int) -> str:
    """A number of KV heads in words."""
    return f"{number:,} KV head{'s' * (number != 1)}"
