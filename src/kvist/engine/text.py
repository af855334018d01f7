"""From tokens to the text that may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most four bytes: once this many tokens wait for one, it can no longer become valid.
_LONGEST_CHARACTER = 4


class Decode(Protocol):
    """A tokenizer's way from token ids to text, special tokens left out."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class GeneratedText:
    """The text of one request's generated tokens, given out as soon as it is final.

    Args:
        decode: from token ids to text.
        prompt_ids: the tokens before; the text continues theirs.
        stop: strings that end the text.

    Attributes:
        stopped: a stop string was found. The text before it has been given out, nothing follows.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._characters = Detokenizer(decode, prompt_ids)
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def push(self, token_id: int) -> str:
        """Take a token, return the text that is now final."""
        return self._stop.push(self._characters.push(token_id))

    def finish(self) -> str:
        """Return what was held back: no token follows."""
        return self._stop.push(self._characters.finish()) + self._stop.finish()


class Detokenizer:
    """Decodes token by token.

    Decoders look beyond one token: a character may have its bytes in several, and some drop a leading space. So a
    window of the last tokens is decoded each time, and what it shows beyond the text already given out is new:

        ids      [ context        | pending ]
        decoded  [ shown          | new     ]

    The context is text that is final; tokens are pending while the window ends in an incomplete character. All
    pieces joined equal the whole decoded at once, with one exception: SentencePiece decoders replace a whole run of
    byte pieces when one of its characters is invalid, and those before it have been given out here.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = _context(decode, prompt_ids)
        self._num_context = len(self._ids)
        self._shown = decode(self._ids).rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Take a token, return the text that is now final."""
        self._ids.append(token_id)
        text = self._window()
        if not text.endswith(_REPLACEMENT):
            new = text[len(self._shown) :]
            self._settle(new)
            return new
        pending = len(self._ids) - self._num_context
        final = text.rstrip(_REPLACEMENT) if pending < _LONGEST_CHARACTER else text[:-1]
        new = final[len(self._shown) :]
        self._shown += new
        return new

    def finish(self) -> str:
        """Return what is pending, replacement characters for bytes that make no character."""
        text = self._window()
        new = text[len(self._shown) :]
        self._shown = text
        return new

    def _window(self) -> str:
        text = self._decode(self._ids)
        if text.startswith(self._shown):
            return text
        # A run of byte pieces whose beginning was given out has become invalid: the rest is decoded by itself.
        del self._ids[: self._num_context]
        self._num_context, self._shown = 0, ""
        return self._decode(self._ids)

    def _settle(self, new: str) -> None:
        """All of the window is final: the tokens since the last settling become the context of the next."""
        if new:
            del self._ids[: self._num_context]
            self._num_context, self._shown = len(self._ids), self._decode(self._ids)
        elif self._shown:
            # A special token. It must not become the context: a decoder would take the next word for the first.
            del self._ids[self._num_context :]
        else:
            self._num_context = len(self._ids)


def _context(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, enough of them to begin with a whole character."""
    num_tokens = 8
    while num_tokens < len(prompt_ids):
        context = list(prompt_ids[-num_tokens:])
        text = decode(context)
        if text and not text.startswith(_REPLACEMENT):
            return context
        num_tokens *= 2
    return list(prompt_ids)


class StopStrings:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    Among several matches the one that begins first wins, however the text comes in pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take text, return the part that no stop string can reach any more."""
        if self.found:
            return ""
        self._held += text
        match = self._first_match()
        limit = len(self._held) if match is None else match
        for start in range(max(0, len(self._held) - self._longest + 1), limit):
            if any(len(stop) > len(self._held) - start and stop.startswith(self._held[start:]) for stop in self._stop):
                return self._give_out(start)
        self.found = match is not None
        return self._give_out(limit)

    def finish(self) -> str:
        """Return the text held back: none follows."""
        if self.found:
            return ""
        match = self._first_match()
        self.found = match is not None
        return self._give_out(len(self._held) if match is None else match)

    def _first_match(self) -> int | None:
        starts = (self._held.find(stop) for stop in self._stop)
        return min((start for start in starts if start >= 0), default=None)

    def _give_out(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def text_after(decode: Decode, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text that token ids add to those before them."""
    context = _context(decode, before)
    shown, text = decode(context), decode([*context, *token_ids])
    return text[len(shown) :] if text.startswith(shown) else decode(token_ids)
