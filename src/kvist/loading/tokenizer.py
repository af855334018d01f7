"""Text to token ids and back, as a model's own files say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from kvist.errors import ModelFileError, OptionError, PromptError
from kvist.loading.untrusted_file import FETCH_AGAIN, read_json

if TYPE_CHECKING:
    from kvist.loading.chat_template import ChatTemplate, Message


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: what a `tokenizer.json` holds.
        special_tokens: by name (`bos_token`), as they are written.
        chat_template: how a conversation is written; None for a model without (a base model).

    Attributes:
        bos_token_id: the token a text begins with; None if the model has none.
        eos_token_id: the token a text ends with, as the tokenizer's files name it; the model may have more.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        # Some files were saved in the middle of training and would cut or fill texts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._template_source = chat_template
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json`, and beside it `tokenizer_config.json`, `special_tokens_map.json` and
        `chat_template.jinja` or `chat_template.json` where they are.

        Raises:
            ModelFileError: `tokenizer.json` is missing, or one of the files is damaged.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelFileError(
                f"tokenizer.json is missing in {directory}: write it with transformers, "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        with _library_errors(f"{path} is no tokenizer that can be read"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        config = _read_optional(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_optional(directory / "special_tokens_map.json"))
        special_tokens |= _special_tokens(config)
        return cls(backend, special_tokens, _chat_template(directory, config))

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id, plus one. Computed on first use: 0.2 s for a vocabulary of 262,144."""
        with _library_errors("the model's tokenizer cannot list its vocabulary"):
            return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Special tokens that are written out in it are found.

        Args:
            text: any text, also an empty one.
            add_special_tokens: begin with the model's BOS token, and end with its EOS, where it was trained so.

        Raises:
            PromptError: the text is no valid Unicode.
            ModelFileError: the tokenizer's files make it fail.
        """
        try:
            with _library_errors("the model's tokenizer fails on this text"):
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise PromptError("the text cannot be tokenized: it is no valid Unicode (UTF-8) text") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, no space of it cleaned up. Ids beyond the vocabulary give nothing.

        A character can be spread over several tokens. While its last one is missing, the text ends in U+FFFD, one or
        more; for tokens that are single bytes, the whole characters right before them read so as well. All other text
        stays as it is when ids are appended. A tokenizer that puts a space before a text takes it off again here, so
        what ids add to others is what decoding all gives beyond decoding those, and not what they give alone.

        Raises:
            OptionError: a number that is no id at all.
            ModelFileError: the tokenizer's files make it fail.
        """
        try:
            with _library_errors("the model's tokenizer fails on these tokens"):
                return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise OptionError(
                f"these are no token ids: ids are whole numbers from 0 to {self.vocab_size - 1}"
            ) from error

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text, to be encoded with `add_special_tokens=False`.

        Raises:
            PromptError: the model has no chat template, or its template does not take these messages.
        """
        if self._chat_template is None:
            raise PromptError(
                "this model has no chat template (a base model, which continues text): give the text itself, "
                "with --raw on the command line or generate() in Python"
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        if self._template_source is None:
            return None
        # Jinja is not needed, nor loaded, until the first chat.
        from kvist.loading.chat_template import ChatTemplate

        return ChatTemplate(self._template_source, self._special_tokens)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        with _library_errors(f"the model's tokenizer cannot look up its {name}"):
            return self._backend.token_to_id(token)


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Turn what a call into `tokenizers` raises into a `ModelFileError`: someone else wrote what it runs.

    Its plain exceptions, and the panics of its Rust code, which do not derive from `Exception` and which Rust has told
    on standard error by then. A `TypeError` or `OverflowError` is about an argument, and for the caller to explain.
    """
    try:
        yield
    except (TypeError, OverflowError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise  # Ctrl-C and its like
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFileError(f"{problem} ({reason}): its tokenizer.json is damaged, {FETCH_AGAIN}") from error


def _read_optional(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The entries like `bos_token`; some files give each as an object with a `content`."""
    found = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _chat_template(directory: Path, config: Mapping[str, object]) -> str | None:
    """The file of its own if there is one, in today's form or in that of older multimodal models, else the
    configuration's; of several the one named `default`.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{path} is no UTF-8 text: {FETCH_AGAIN}") from error
    path = directory / "chat_template.json"
    if not path.is_file():
        path = directory / "tokenizer_config.json"
    template = (config if path.name == "tokenizer_config.json" else read_json(path)).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise ModelFileError(f"the chat_template in {path} is neither a text nor a list of named ones: {FETCH_AGAIN}")
