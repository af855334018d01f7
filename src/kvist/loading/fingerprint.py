"""What tells one model from another: the bytes of its files, and the static values of its quantised keys."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import ModelFileError
from kvist.loading.progress import Progress

if TYPE_CHECKING:
    from kvist.kernels.key_statics import KeyStatics

_HASHED_AT_ONCE = 4 << 20

# The tensors of a layer's static values, in the order in which they are hashed.
STATIC_NAMES = ("offset", "scale", "feedback", "frequencies")


def file_hash(path: Path, progress: Progress) -> str:
    """The XXH3 hash of a file, 32 hexadecimal digits; `ModelFileError` if it cannot be read."""
    import xxhash

    digest, done = xxhash.xxh3_128(), 0
    try:
        total = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_HASHED_AT_ONCE))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                progress(f"reading {path.name}", done, total)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


class FilesHash:
    """The hash of a model's files, which is computed when it is first asked for: it reads all of them.

    Args:
        files: in the order in which they count.
        known: the hash, where it was needed before.
    """

    def __init__(self, files: Sequence[Path], known: str | None = None) -> None:
        self._files = tuple(files)
        self._known = known
        self._lock = threading.Lock()

    def get(self, progress: Progress) -> str:
        """32 hexadecimal digits; `ModelFileError` if a file cannot be read any more."""
        import xxhash

        with self._lock:
            if self._known is None:
                hashes = [file_hash(file, progress) for file in self._files]
                self._known = xxhash.xxh3_128_hexdigest("\n".join(hashes).encode())
            return self._known


def statics_hash(statics: Sequence[KeyStatics]) -> str:
    """The hash of the static values of all layers, 32 hexadecimal digits."""
    import xxhash

    digest = xxhash.xxh3_128()
    for layer in statics:
        for name in STATIC_NAMES:
            digest.update(getattr(layer, name).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(files_hash: str, weights_format: str, statics: Sequence[KeyStatics] | None) -> str:
    """What keys and values in a cache depend on besides their format; `statics` where its keys are quantised."""
    parts = [files_hash, weights_format]
    return "-".join(parts if statics is None else [*parts, statics_hash(statics)])
