"""Write which names ao's packages register, for errors where one of them is not installed."""

from __future__ import annotations

import json

from ao_core.ext import registry
from ao_core.known import KNOWN
from workspace import packages

#: tables whose names a user, or a file, may ask for
TABLES = (
    "dtypes",
    "layouts",
    "scale_methods",
    "transforms",
    "algorithms",
    "model_transforms",
    "recipes",
)


def registered() -> dict[str, list[str]]:
    """The names of each package of the workspace but ao-core, sorted."""
    found = {
        dist: sorted(
            {
                name
                for plural in TABLES
                for name in registry.tables[plural].names()
                if registry.tables[plural].provider(name) == dist
            }
        )
        for dist in (folder.name for folder in packages())
        if dist != "ao-core"
    }
    return {dist: names for dist, names in found.items() if names}


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(registered(), indent=1) + "\n", "utf-8")
