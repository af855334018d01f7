"""The merges of a byte-pair vocabulary: as a GGUF lists them, or recovered from SentencePiece scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvist.errors import ModelFileError, shown
from kvist.loading.untrusted_file import DAMAGED

Merge = tuple[str, str]

# Recovering a merge takes time with the square of the token's length. Real vocabularies stay far below this.
_LONGEST_MERGED_TOKEN = 512


def listed_merges(lines: Sequence[str], vocabulary: Collection[str]) -> list[Merge]:
    """The pairs of `tokenizer.ggml.merges`, first rank first, each once.

    Raises:
        ModelFileError: a line is no pair, or makes or takes a token that is not in the vocabulary.
    """
    merges: dict[Merge, None] = {}
    for line in lines:
        # A token may begin with a space, so the first character never separates.
        split = line.find(" ", 1)
        left, right = line[:split], line[split + 1 :]
        if split < 0 or not right:
            raise ModelFileError(f"the GGUF file's merge {shown(line)} is not two tokens: {DAMAGED}")
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ModelFileError(
                    f"the GGUF file's merge {shown(line)} needs the token {shown(token)}, which its vocabulary lacks: "
                    f"{DAMAGED}"
                )
        merges[left, right] = None
    return list(merges)


def merges_from_scores(
    tokens: Sequence[str], scores: npt.NDArray[np.float32], mergeable: Sequence[bool]
) -> list[Merge]:
    """Merges that rebuild SentencePiece's BPE (arXiv 1808.06226), which knows scores of tokens and no pairs.

    SentencePiece joins, again and again, the two neighbours whose concatenation is the token with the best score, the
    leftmost first. Within the span of one token this runs as it would on that token's text alone: a merge across the
    border would keep the token from being formed. So each token comes about in exactly one way, and the pair of its
    last step is the only one worth listing; that halves the list, and with it the time to load it.

    Args:
        tokens: the vocabulary.
        scores: one for each token; a better one merges earlier.
        mergeable: the tokens that merges may make: neither special, nor bytes, nor matched as a whole beforehand.
    """
    by_score = [index for index in np.argsort(-scores, kind="stable").tolist() if mergeable[index]]
    rank = {tokens[index]: position for position, index in enumerate(by_score)}
    # Text starts out as single characters, whatever kind of token they are.
    parts = set(rank).union(token for token in tokens if len(token) == 1)
    merges: list[Merge] = []
    for index in by_score:
        token = tokens[index]
        if len(token) > _LONGEST_MERGED_TOKEN:
            raise ModelFileError(
                f"the GGUF file's token {index} is {len(token)} characters long; at most {_LONGEST_MERGED_TOKEN} are "
                f"plausible: {DAMAGED}"
            )
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in parts and token[cut:] in parts]
        if len(cuts) == 1:
            # If the token can be formed at all, then so; most need no replay.
            merges.append((token[: cuts[0]], token[cuts[0] :]))
        elif cuts and (last := _last_merge(token, rank)) is not None and last[0] in parts and last[1] in parts:
            merges.append(last)
    return merges


def _last_merge(token: str, rank: dict[str, int]) -> Merge | None:
    """The last pair joined when `token` alone is merged; None if that does not end in one token."""
    never = len(rank)
    pieces = list(token)
    ranks = [rank.get(left + right, never) for left, right in pairwise(pieces)]
    while len(pieces) > 2:
        best = min(ranks)
        if best == never:
            return None
        at = ranks.index(best)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        del ranks[at]
        for pair in (at - 1, at):
            if 0 <= pair < len(ranks):
                ranks[pair] = rank.get(pieces[pair] + pieces[pair + 1], never)
    return pieces[0], pieces[1]


def merge_entries(merges: Sequence[Merge]) -> list[str] | list[Merge]:
    """Merges as a `tokenizer.json` lists them: one string each where that is unambiguous, else pairs.

    `tokenizers` reads strings in about 0.6 of the time and half of the memory of pairs. It splits them at the space,
    and takes one that begins with `#version` for a header.
    """
    if any(" " in left or " " in right or left.startswith("#version") for left, right in merges):
        return list(merges)
    return [f"{left} {right}" for left, right in merges]
