"""Hub ids go through the Hub's own cache, its switches are honoured, and its errors become one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny_files import write_tiny_directory, write_tiny_gguf

from kvist.errors import DownloadError, KvistError, ModelNotFoundError
from kvist.loading import hub
from kvist.loading.hub import fetch_file, fetch_repository
from kvist.loading.progress import no_progress

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_repository(hub_home: Path, repo: str, revision: str, write: Callable[[Path], object]) -> Path:
    """A repository as the Hub's library leaves it in its cache: blobs, and snapshots that link to them."""
    root = hub_home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / COMMIT, root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True)
    write(blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (root / "refs" / revision).write_text(COMMIT)
    return snapshot


# Loads each model named on the command line and prints its name, or the error as the command line would.
LOADER = """
import json, sys
from kvist.errors import KvistError
from kvist.loading import load
for model in sys.argv[1:]:
    try:
        loaded = load(model)
        print(json.dumps([loaded.name, loaded.config.model_type]))
    except KvistError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_models_load_from_the_hubs_cache_while_offline(tmp_path: Path) -> None:
    cached_repository(tmp_path, "org/sharded", "main", lambda folder: write_tiny_directory(folder, num_shards=2))
    cached_repository(tmp_path, "org/pinned", "v1.0", write_tiny_directory)
    cached_repository(tmp_path, "org/files", "main", lambda folder: write_tiny_gguf(folder / "tiny.Q8_0.gguf"))
    models = [
        "org/sharded",
        "org/pinned@v1.0",
        "org/files/tiny.Q8_0.gguf",
        "org/absent",
        "org/pinned",
        "org/files/no.gguf",
    ]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "KVIST_CACHE": str(tmp_path / "kvist")}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *models],
        env=os.environ | environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results[:3] == [["org/sharded", "llama"], ["org/pinned", "llama"], ["tiny.Q8_0", "llama"]]
    for (kind, message), model in zip(results[3:], models[3:], strict=True):
        assert kind == "DownloadError"
        assert message.startswith(f"{model} is not in the Hub's local cache, and the Hub is not reached")
    assert done.stderr == ""


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404, url="u")


def hub_error(kind: type[Exception]) -> Exception:
    if issubclass(kind, errors.HfHubHTTPError):
        return kind("Client error\nfor url: ...", response=RESPONSE)  # type: ignore[arg-type]
    return kind("Client error\nfor url: ...")


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        (errors.RepositoryNotFoundError, ModelNotFoundError, "org/name at revision r is not on the Hugging Face Hub"),
        (errors.GatedRepoError, DownloadError, "is gated: accept its terms on the Hub, then log in"),
        (errors.RevisionNotFoundError, ModelNotFoundError, "org/name has no revision 'r'"),
        (errors.RemoteEntryNotFoundError, ModelNotFoundError, "the repository has no such file"),
        (errors.LocalEntryNotFoundError, DownloadError, "is not in the Hub's local cache"),
        (errors.OfflineModeIsEnabled, DownloadError, "org/name at revision r could not be fetched: Client error"),
        (errors.HfHubHTTPError, DownloadError, "could not be fetched: Client error"),
        (errors.HFValidationError, ModelNotFoundError, "'org/name' is no name of a model"),
        (TimeoutError, DownloadError, "could not be fetched: Client error"),
    ],
)
def test_the_hubs_errors_become_one_line(
    kind: type[Exception], error: type[KvistError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(error) as caught:
        fetch_repository("org/name", "r", no_progress)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (OSError(), "OSError"),
        (OSError("\n\n"), "OSError"),
        (ConnectionResetError(104, "Connection reset by peer"), "[Errno 104] Connection reset by peer"),
        (httpx2.ReadError("peer closed\nthe connection"), "peer closed the connection"),
        (httpx2.ConnectTimeout(""), "ConnectTimeout"),
        (httpx2.InvalidURL("no host"), "no host"),
        (errors.FileMetadataError("no ETag"), "no ETag"),
    ],
)
def test_a_network_that_fails_is_one_line_that_is_never_empty(
    failure: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError) as caught:
        fetch_repository("org/name", None, no_progress)
    assert f"org/name could not be fetched: {reason}; check the network" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_ours_is_no_network_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: {}["mistake"])
    with pytest.raises(KeyError):
        fetch_repository("org/name", None, no_progress)


def test_every_file_that_is_fetched_is_one_that_loading_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = "".join(path.read_text() for path in Path(hub.__file__).parent.glob("*.py") if path.name != "hub.py")
    named = [name for name in hub._FILES if "*" not in name]
    assert [name for name in named if f'"{name}"' not in sources] == []


def test_no_pickle_is_ever_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: asked.update(options) or "x")
    assert fetch_repository("org/name", None, no_progress) == Path("x")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not [pattern for pattern in patterns if not pattern.endswith((".json", ".jinja", ".safetensors"))]


def test_one_file_of_a_repository_is_fetched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *names, revision: asked.append((*names, revision)) or "/x/f.gguf"
    )
    assert fetch_file("org/name", "f.gguf", "v1", no_progress) == Path("/x/f.gguf")
    assert asked == [("org/name", "f.gguf", "v1")]
