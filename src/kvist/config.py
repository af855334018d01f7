"""Frozen configurations: what a model is, how its cache is kept, how the engine steps, how a token is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist.checks import biases, check_integer, check_number, in_words, strings, token_ids
from kvist.errors import OptionError, did_you_mean
from kvist.kv_format import LayerFormats

WEIGHTS_FORMATS = ("bf16", "fp32", "int8", "int4", "gguf")


def check_format(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`, else raise `OptionError` naming the nearest."""
    if value not in known:
        raise OptionError(f"unknown {option} '{value}': {did_you_mean(str(value), known)}")
    return value


# --- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) of a layer: its base and how it is stretched."""

    theta: float
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What the cache and attention must know of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    """Tokens that a query sees, itself included; None sees all."""

    def __post_init__(self) -> None:
        check_integer("num_kv_heads", self.num_kv_heads, 1)
        check_integer("head_dim", self.head_dim, 1)
        if self.window is not None:
            check_integer("window", self.window, 1, note=", or None to see all")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every decoder has. A family's own switches live in its subclass, beside its layers."""

    model_type: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    """One entry per layer: the tokens that a query of that layer sees, itself included; None sees all."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        return tuple(LayerConfig(self.num_kv_heads, self.head_dim, window) for window in self.windows)


# --- the cache and the engine -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheConfig:
    """How keys and values are kept.

    Args:
        kv_format: how they are stored.
        memory_bytes: the most that all sequences together may hold.
        rewind_slack_tokens: how far a sequence can be rewound, from the longest that it has been, without losing what
            its windows see. They keep as many tokens more.
        max_step_tokens: the most tokens of a sequence in one step. Windows keep room for as many.
    """

    kv_format: LayerFormats
    memory_bytes: int
    rewind_slack_tokens: int = 64
    max_step_tokens: int = 2048

    def __post_init__(self) -> None:
        check_integer("memory_bytes", self.memory_bytes, 1)
        check_integer("rewind_slack_tokens", self.rewind_slack_tokens, 0)
        check_integer("max_step_tokens", self.max_step_tokens, 1)


@dataclass(frozen=True)
class EngineConfig:
    """How much one step takes on.

    Args:
        max_step_tokens: the most tokens of all sequences in one step; long prompts are computed in chunks of it.
        max_sequences: the most sequences that run at once; others wait.
    """

    max_step_tokens: int = 2048
    max_sequences: int = 64

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_sequences"):
            check_integer(name, getattr(self, name), 1)
        if self.max_sequences > self.max_step_tokens:
            raise OptionError(
                f"max_sequences ({self.max_sequences}) exceeds max_step_tokens ({self.max_step_tokens}): "
                "every running sequence needs a token in a step"
            )


# The runtime keeps a stack and a wait for each; it crashes long before it runs out of numbers.
MOST_THREADS = 1024


def check_threads(option: str, threads: int) -> int:
    """Return a number of threads that can be run with, else raise `OptionError`."""
    return check_integer(option, threads, 1, MOST_THREADS, note=", best the number of CPUs")


# --- the sampler ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    The order is: logit_bias, penalties, temperature, top_k, top_p, min_p. Each is off at its default.

    Args:
        max_tokens: the most tokens to generate.
        temperature: 0 takes the most likely token (greedy); 1 draws from the model's distribution.
        top_k: draw among the k most likely tokens; 0 is off.
        top_p: draw among the fewest tokens whose probabilities reach p (nucleus sampling, arXiv 1904.09751).
        min_p: drop tokens less likely than min_p times the most likely one (arXiv 2407.01082).
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the
            text holds (arXiv 1909.05858); 1 is off.
        presence_penalty: subtracted from the logits of tokens that the generated text holds.
        frequency_penalty: subtracted once for each time the generated text holds the token.
        seed: makes the draws of this request repeatable; what runs beside it does not change them, though it may still
            change the last bits of the logits that they are drawn from. None draws a new seed.
        stop: strings that end the text; they are never part of it. One alone may be given as it is; None is none.
        stop_token_ids: tokens that end the text, besides the model's own; None is none.
        ignore_eos: go on past the model's own end tokens.
        logit_bias: added to the logits of these token ids; -inf forbids a token; None is none.
        logprobs: for each token, how many of the most likely ones to report with their log-probability, from the
            model's own distribution (before bias, penalties and temperature); 0 reports the drawn token's
            alone; None reports nothing.

    Raises:
        OptionError: a value is of the wrong kind or out of range. What this lets through, no step stumbles over.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._set("max_tokens", check_integer("max_tokens", self.max_tokens, 1))
        self._set("top_k", check_integer("top_k", self.top_k, 0, note=", and 0 is off"))
        if self.seed is not None:
            self._set("seed", check_integer("seed", self.seed, 0, note=", or None for a new one each time"))
        if self.logprobs is not None:
            self._set("logprobs", check_integer("logprobs", self.logprobs, 0, 100, note=", or None for none"))
        self._set("temperature", check_number("temperature", self.temperature, 0))
        self._set("top_p", check_number("top_p", self.top_p, 0, 1, open_low=True))
        self._set("min_p", check_number("min_p", self.min_p, 0, 1))
        self._set("repetition_penalty", check_number("repetition_penalty", self.repetition_penalty, 0, open_low=True))
        self._set("presence_penalty", check_number("presence_penalty", self.presence_penalty))
        self._set("frequency_penalty", check_number("frequency_penalty", self.frequency_penalty))
        self._set("stop", strings("stop", self.stop))
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", biases("logit_bias", self.logit_bias))
        if "" in self.stop:
            raise OptionError("a stop string is empty: it would end every text at once; leave it out")
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos is {in_words(self.ignore_eos)}: it must be True or False")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def checked_params(params: object) -> SamplingParams:
    """The parameters of one request, the defaults for None; `OptionError` for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise OptionError(f"params must be a single SamplingParams for a single prompt, not {type(params).__name__}")
    return params
