"""What one step computes: a decision, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The tokens `start` to `stop` (exclusive) of a sequence; all before them are in the cache.

    `samples` where they end with the sequence's last token, so that the next one can be drawn.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Refusal:
    """A sequence that cannot run, and the reason: mostly that it does not fit into the cache."""

    sequence: Sequence
    error: Exception


@dataclass(frozen=True)
class StepPlan:
    """The chunks of one step in the order in which they are packed into `T`, and the sequences that cannot run.

    Sequences with one token to compute come first, then longer chunks of prompts.
    """

    chunks: tuple[Chunk, ...]
    refusals: tuple[Refusal, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that draw a token, in the order of the logits `[S, V]`."""
        return tuple(chunk.sequence for chunk in self.chunks if chunk.samples)
