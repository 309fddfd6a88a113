"""The records that ao-hf adds to the registry of ao-core."""

from __future__ import annotations

from ao_core import FolderKind, hookimpl
from ao_hf import folders, hub


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_folder_kinds() -> list[FolderKind]:
    """Folders with a config.json of transformers."""
    return [
        FolderKind(
            "transformers",
            recognizes=folders.recognizes,
            refuses=folders.refuses,
            files=folders.files,
            hint=folders.hint,
            model=folders.model,
            fetch=hub.fetch,
        )
    ]
