"""How a byte-level vocabulary cuts text into words before its merges run, by the name a GGUF gives that rule.

llama.cpp names these rules after the first model that used them (`tokenizer.ggml.pre`). The patterns are those of the
original models' `tokenizer.json`; llama.cpp runs equivalents of them. A wrong rule gives wrong ids without any other
sign of trouble, so a name that is not listed here is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvist.errors import UnsupportedModelError, did_you_mean, shown

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The same pattern but for how many digits stay together.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CL100K.format(digits=r"\p{N}{1,3}")
_QWEN2 = _CL100K.format(digits=r"\p{N}")

_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordSplit:
    """The rule behind one value of `tokenizer.ggml.pre`.

    Attributes:
        patterns: applied one after another; each cuts what the former left, and keeps what it does not match.
        ignore_merges: a word that is itself a token is not merged from its bytes.
        adds_bos: whether a text begins with the BOS token when the file does not say.
        nfc: text is brought to Unicode normal form C first. llama.cpp leaves this out; the original does it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """The rule as the `pre_tokenizer` of a `tokenizer.json`."""
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


_DIGITS_APART = WordSplit((r"\p{N}", _GPT2))
_AS_LLAMA3 = WordSplit((_LLAMA3,), ignore_merges=True, adds_bos=True)

_SPLITS = {
    # What llama.cpp does for a file converted without knowing the model; no original tokenizer stands behind it.
    "default": WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": WordSplit((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "llama-bpe": _AS_LLAMA3,
    "llama3": _AS_LLAMA3,
    "llama-v3": _AS_LLAMA3,
    "falcon3": _AS_LLAMA3,
    "pixtral": _AS_LLAMA3,
    "midm-2.0": _AS_LLAMA3,
    "smaug-bpe": WordSplit((_LLAMA3,)),
    "qwen2": WordSplit((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": WordSplit((_QWEN2,)),
    "megrez": WordSplit((_QWEN2,)),
    "seed-coder": WordSplit((_SEED_CODER,)),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "tekken": WordSplit((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def word_split(name: str) -> WordSplit:
    """The rule that a GGUF names; `UnsupportedModelError` if it is not one of those above."""
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"the GGUF file splits words by the rule {shown(name)} (tokenizer.ggml.pre), which is not known here: "
            f"{did_you_mean(name, _SPLITS)}"
        )
    return _SPLITS[name]
