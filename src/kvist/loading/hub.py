"""Fetches a model from the Hugging Face Hub, through its own library, cache, token and offline switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvist.errors import DownloadError, ModelNotFoundError
from kvist.loading.progress import Progress

# What a decoder and its tokenizer are made of; pickled weights are never fetched.
_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.json", "chat_template.jinja", "model.safetensors",
    "model.safetensors.index.json", "model-*-of-*.safetensors",
)  # fmt: skip

# Whose exceptions mean that the network failed: the Hub's library, and what it talks HTTP with in its versions.
_NETWORK_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")


def fetch_repository(repo_id: str, revision: str | None, progress: Progress) -> Path:
    """The local snapshot of a model in Hugging Face format."""
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(repo_id, revision=revision, allow_patterns=list(_FILES))

    return _fetched(repo_id, revision, fetch, progress)


def fetch_file(repo_id: str, file_name: str, revision: str | None, progress: Progress) -> Path:
    """The local copy of one file of a repository."""
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(repo_id, file_name, revision=revision)

    return _fetched(f"{repo_id}/{file_name}", revision, fetch, progress)


def local_repository(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot of a model in the Hub's local cache; None where it is not there."""
    config = local_file(repo_id, "config.json", revision)
    return None if config is None else config.parent


def local_file(repo_id: str, file_name: str, revision: str | None) -> Path | None:
    """One file of a repository in the Hub's local cache; None where it is not there."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo_id, file_name, revision=revision)
    except errors.HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _fetched(name: str, revision: str | None, fetch: Callable[[], str], progress: Progress) -> Path:
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    progress(f"fetching {name} from the Hugging Face Hub", 0, None)
    at = f"{name} at revision {revision}" if revision else name
    try:
        return Path(fetch())
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{at} is gated: accept its terms on the Hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no revision '{revision}' on the Hugging Face Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{at} is not on the Hugging Face Hub; if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{at} is not in the Hub's local cache, and the Hub is not reached (no network, or HF_HUB_OFFLINE is set)"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{at} is not on the Hugging Face Hub: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"'{name}' is no name of a model on the Hugging Face Hub") from error
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _NETWORK_LIBRARIES:
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DownloadError(
            f"{at} could not be fetched: {reason}; check the network and the free space, then try again"
        ) from error
