"""Stands in for `python -m pip`: takes the same command, and a wheelhouse instead of a network.

Environment: FAKE_WHEELS, the folder of wheels; FAKE_PIP_SAYS, what it prints before it fails; FAKE_PIP_WAITS, a file
that it makes before it waits for ever with half a wheel written; FAKE_PIP_LOG, where it notes how it was called.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

arguments = sys.argv[1:]
requirement = arguments[-1]
folder = Path(arguments[arguments.index("-d") + 1])
with Path(os.environ["FAKE_PIP_LOG"]).open("a") as log:
    log.write(json.dumps({"arguments": arguments, "tmpdir": os.environ["TMPDIR"]}) + "\n")
if message := os.environ.get("FAKE_PIP_SAYS"):
    print(message, file=sys.stderr)
    sys.exit(1)
wheel = Path(os.environ["FAKE_WHEELS"]) / (requirement.replace("==", "-") + "-py3-none-any.whl")
(Path(os.environ["TMPDIR"]) / "pip-unpack").write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
if waits := os.environ.get("FAKE_PIP_WAITS"):
    Path(waits).touch()
    time.sleep(1000)
time.sleep(0.3)
shutil.copy(wheel, folder)
