"""`--data FILE` and what goes with it: the inputs of a model, and how they were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_core.calibration.samples import Sample

__all__ = ["batches_of_option", "drawn"]


def batches_of_option(
    folder: Path, data: Path | None, **options: int | None
) -> list[Sample] | None:
    """The inputs that a file has, for the model of a folder."""
    from ao_core.calibration.texts import batches_of_file
    from ao_core.checkpoints.folders import tokenizer_of
    from ao_core.errors import ConfigError

    given = {name: value for name, value in options.items() if value is not None}
    if data is None:
        if given:
            raise ConfigError(f"--{next(iter(given))} is of --data FILE, which is not given")
        return None
    return batches_of_file(data, tokenizer_of(folder), **given)


def drawn(data: Path, **options: int | None) -> dict[str, Any]:
    """What the lock says of them: the name of the file, and the options."""
    from ao_core.calibration.texts import WINDOW

    defaults = {"tokens": None, "window": WINDOW, "seed": 0}
    given = {name: value for name, value in options.items() if value is not None}
    return {"file": data.name, **defaults, **given}
