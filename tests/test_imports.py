"""Imports point down only, and `import kvist` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvist"

# From the ground up. A module may import its own layer and those below: at the top, in a function and for types alike.
LAYERS = (
    ("errors",),
    ("checks",),
    ("kv_format", "memory"),
    ("config", "threads"),
    ("results",),
    ("kernels",),
    ("cache", "eviction"),
    ("attention",),
    ("models",),
    ("loading",),
    ("engine",),
    ("llm", "session"),
    ("__init__",),
    ("bench", "evaluate", "convert", "integrations", "server"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "gguf", "rich", "typer", "jinja2")


def layer_of(module: str) -> str:
    """The part of Kvist that a dotted name lies in: `kvist.cache.kv_cache` -> `cache`, `kvist` -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_layers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and layer of every import of Kvist's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            module = node.module or ""
            # `from kvist import x`: x is a part of Kvist, or a public name that __init__ hands on.
            names = (
                [f"kvist.{a.name}" if a.name in RANK else "kvist" for a in node.names]
                if module == "kvist"
                else [module]
            )
        else:
            continue
        yield from ((node.lineno, layer_of(name)) for name in names if name.split(".")[0] == "kvist")


def upward_imports(layer: str, source: str) -> list[str]:
    """Imports in a file of `layer` that point up."""
    return [
        f"line {line}: {layer} imports {to}"
        for line, to in imported_layers(ast.parse(source))
        if RANK.get(to, len(LAYERS)) > RANK[layer]
    ]


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(SOURCE).with_suffix("").parts[0]
    assert layer in RANK, f"{layer} has no place in LAYERS: decide where it stands"
    assert upward_imports(layer, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("layer", "source", "upward"),
    [
        ("cache", "from kvist.models.step_inputs import StepInputs", ["line 1: cache imports models"]),
        ("engine", "def f():\n    import kvist.llm", ["line 2: engine imports llm"]),
        ("config", "from kvist import LLM", ["line 1: config imports __init__"]),
        ("kernels", "from kvist import cache", ["line 1: kernels imports cache"]),
        ("models", "import torch\nfrom kvist.config import ModelConfig\nfrom kvist.models.layers import x", []),
    ],
)
def test_an_import_that_points_up_is_seen(layer: str, source: str, upward: list[str]) -> None:
    assert upward_imports(layer, source) == upward


def test_import_kvist_is_light() -> None:
    code = f"import sys, kvist; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
