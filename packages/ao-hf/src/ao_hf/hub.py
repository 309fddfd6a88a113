"""Names of models on the Hub of Hugging Face, and the folders that they stand for on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ao_core.ext import CheckpointError

__all__ = ["fetch", "model_of"]

#: ORG/NAME, and @REVISION
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
#: the cache keeps a model in such a folder
_CACHED = re.compile(r"models--(.+?)--(.+)")
#: what is brought: weights, configurations, tokenizers, templates of chats, code of models, cards, licences
_WANTED = (
    "*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def fetch(name: str) -> Path | None:
    """The folder of a model of the Hub, downloaded or from the cache; None for what is no ORG/NAME.

    Only files at the top are brought, and no pickles. `ORG/NAME@REVISION` is a branch, tag or commit.

    Raises:
        CheckpointError: there is none, it may not be read, it cannot be reached and is not in the cache, or
            it has no safetensors files.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    model, revision = match.groups()
    nowhere = f"{name}: there is no such directory or file, and"
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(_WANTED),
                ignore_patterns=["*/*", "consolidated*"],
                library_name="ao",
            )
        )
    except hub.HFValidationError as error:
        raise CheckpointError(f"{nowhere} it is no name of a model of the Hub: {error}") from error
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the Hub gives this model to those who asked for it: ask on "
            f"{constants.ENDPOINT}/{model}, then log in (hf auth login)"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{nowhere} the Hub has no such model, or it is private (hf auth login)"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the model has no revision {revision!r}") from error
    except hub.IncompleteSnapshotError as error:
        raise CheckpointError(
            f"{name}: the Hub cannot be reached{_offline()}, and the cache has only a part of the model: "
            f"{error.snapshot_path}"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{nowhere} the Hub cannot be reached{_offline()}, and its cache in {constants.HF_HUB_CACHE} has "
            "no model of that name"
        ) from error
    except (OSError, hub.HfHubHTTPError) as error:
        raise CheckpointError(f"{name}: could not be downloaded: {error}") from error
    _check_weights(name, model, revision, folder)
    return folder


def _check_weights(name: str, model: str, revision: str | None, folder: Path) -> None:
    """Raise `CheckpointError` where a model has no weights that ao reads."""
    if any(folder.glob("*.safetensors")):
        return
    files = sorted({*os.listdir(folder), *_published(model, revision)})
    if pickles := [file for file in files if file.endswith(_PICKLES)]:
        raise CheckpointError(
            f"{name}: has its weights as pickles only ({', '.join(pickles[:3])}), which can run code when "
            "they are loaded, so ao does not: convert them to safetensors, or take another model"
        )
    raise CheckpointError(f"{name}: has no safetensors files at its top, in {folder}")


def _published(model: str, revision: str | None) -> list[str]:
    """The files that the Hub has, as far as that is known without asking it again."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(model, revision=revision)]
    except CachedRepoTreeNotFoundError:
        return []


def _offline() -> str:
    from huggingface_hub import constants

    return " (HF_HUB_OFFLINE=1)" if constants.is_offline_mode() else ""


def model_of(name_or_path: str | os.PathLike[str]) -> str | None:
    """The name on the Hub of what a model was loaded from; None where that is a folder of one's own."""
    path = Path(name_or_path)
    for part in path.parts if path.exists() else ():
        if match := _CACHED.fullmatch(part):
            return "/".join(match.groups())
    match = _NAME.fullmatch(str(name_or_path))
    return match[1] if match and not path.exists() else None
