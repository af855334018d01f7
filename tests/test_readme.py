"""The README is run: its Python as it stands, its commands, its targets; and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language} block: was its form changed?"
    return found


COMMANDS = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.strip()]
MAKE_TARGETS = [command.removeprefix("make ") for command in COMMANDS if command.startswith("make ")]
KVIST_COMMANDS = [command for command in COMMANDS if not command.startswith("make ")]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        arguments, env={**os.environ, "PATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str, smollm2_gguf: Path) -> None:
    result = run([sys.executable, "-W", "error", "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", KVIST_COMMANDS)
def test_command(command: str, smollm2_gguf: Path) -> None:
    assert "kvist" in command
    result = run(["bash", "-euo", "pipefail", "-c", command])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_target(target: str) -> None:
    result = run(["make", "--dry-run", target])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_section_is_there_once(document: Path) -> None:
    headings = re.findall(r"^## .*", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [heading for heading in dict.fromkeys(headings) if headings.count(heading) > 1] == []
