"""An environment of its own for each peer, made once and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from peers import Peer

_INSTALLED = "installed.json"
_LOG = "install.log"
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"


class InstallError(Exception):
    """A peer cannot be installed here. The message is one line."""


def python_of(peer: Peer, environments: Path) -> Path:
    """The interpreter that a peer's adapter runs in; its environment is made where it is missing or outdated.

    Raises:
        InstallError: pip failed.
    """
    if not peer.requirements:
        return Path(sys.executable)
    folder = environments / peer.name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    installed = folder / _INSTALLED
    wanted = json.dumps([sys.version_info[:2], peer.requirements, peer.removed])
    if installed.is_file() and installed.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {peer.name} ({', '.join(peer.requirements)}), which may compile for minutes", flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    log = folder / _LOG
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *peer.requirements]
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | peer.install_variables,
            check=False,
        ).returncode
        if peer.removed and not status:
            uninstall = [str(python), "-m", "pip", "uninstall", "--yes", *peer.removed]
            status = subprocess.run(
                uninstall, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            ).returncode
    if status:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "ERROR" in line]
        raise InstallError(f"{(said or ['pip failed'])[-1].strip()} (all of it is in {log})")
    installed.write_text(wanted, encoding="utf-8")
    return python


def versions(peer: Peer, python: Path) -> dict[str, str]:
    """Of the packages that a peer names."""
    if not peer.packages:
        return {}
    answer = subprocess.run(
        [str(python), "-c", _VERSIONS, *peer.packages], check=True, capture_output=True, text=True, timeout=60
    )
    found: dict[str, str] = json.loads(answer.stdout)
    return found
