"""A model that answers by rote, and what a command line came to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from kvist.config import SamplingParams
from kvist.errors import PromptError
from kvist.results import Completion, TextDelta, Timings


@dataclass
class FakeTokenizer:
    has_chat_template: bool = True


class FakeStream:
    """Like `DeltaStream`: an iterator that ends when it is closed."""

    def __init__(self, deltas: Generator[TextDelta, None, None]) -> None:
        self._deltas = deltas

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> TextDelta:
        return next(self._deltas)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._deltas.close()


@dataclass
class FakeSession:
    llm: FakeLLM
    system: str | None
    turns: list[str] = field(default_factory=list)
    tokens: int = 0

    def stream_chat(self, text: str, params: SamplingParams) -> FakeStream:
        if text == "too long":
            raise PromptError("the context is full")
        self.turns.append(text)
        cached, self.tokens = self.tokens, self.tokens + 10
        return self.llm.answer(f"turn {len(self.turns)}: ", text, prompt_tokens=self.tokens, cached_tokens=cached)

    @property
    def length(self) -> int:
        return self.tokens

    def reset(self) -> None:
        self.turns.clear()
        self.tokens = 0

    def close(self) -> None:
        self.llm.closed.append("session")


@dataclass
class FakeLLM:
    """Answers every prompt with it, a word at a time; `asked` records what reached it."""

    has_chat_template: bool = True
    model_name: str = "rote"
    weights_format: str = "bf16"
    weights_bytes: int = 3 << 20
    bf16_matrices: tuple[str, ...] = ()
    kv_format: str = "bf16"
    kernel: str = "by rote"
    max_context: int = 2048
    loaded_with: dict[str, object] = field(default_factory=dict)
    asked: list[tuple[object, SamplingParams]] = field(default_factory=list)
    sessions: list[FakeSession] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    finish_reason: str = "stop"
    during_answer: Callable[[], None] = lambda: None

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer(self.has_chat_template)

    def stream(self, prompt: str, params: SamplingParams) -> FakeStream:
        self.asked.append((prompt, params))
        return self.answer(prompt)

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> FakeStream:
        self.asked.append((list(messages), params))
        return self.answer(messages[-1]["content"])

    def session(self, *, system: str | None = None) -> FakeSession:
        self.sessions.append(FakeSession(self, system))
        return self.sessions[-1]

    def close(self) -> None:
        self.closed.append("llm")

    def answer(self, *pieces: str, prompt_tokens: int = 5, cached_tokens: int = 0) -> FakeStream:
        return FakeStream(self._deltas(pieces, prompt_tokens, cached_tokens))

    def _deltas(
        self, pieces: Sequence[str], prompt_tokens: int, cached_tokens: int
    ) -> Generator[TextDelta, None, None]:
        for index, piece in enumerate(pieces):
            self.during_answer()
            yield TextDelta(piece, (index,), None)
        completion = Completion(
            text="".join(pieces),
            token_ids=tuple(range(len(pieces))),
            finish_reason=self.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(pieces),
            cached_tokens=cached_tokens,
            kv_bytes=2048,
            kv_bytes_per_token=256,
            timings=Timings(ttft_ms=12.345, prefill_tokens_per_s=400.0, decode_tokens_per_s=None),
            logprobs=None,
        )
        yield TextDelta("", (), completion)


@dataclass
class Outcome:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error: nothing on standard output, code 2."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("error: "), self.err
        return self.err.removeprefix("error: ").rstrip("\n")
