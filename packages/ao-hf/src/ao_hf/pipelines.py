"""Folders of pipelines of diffusers: components are quantized, and everything else is copied.

Needs no library of Hugging Face.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ao_core import Config, Report, config_to_dict, quantize_checkpoint, resolve_config
from ao_core.ext import CheckpointError, ConfigError, ConfigLike, checked, json_object
from ao_core.ext.quantizing import Progress
from ao_core.ext.saving import not_a_file, read_text

__all__ = ["PIPELINE", "components_of", "quantize_pipeline"]

#: what makes a folder that of a pipeline
PIPELINE = "model_index.json"


def components_of(folder: Path) -> list[str]:
    """Names of the components of a pipeline that have files of tensors; empty where it is none."""
    if not_a_file(folder / PIPELINE):
        return []
    try:
        entries = json_object(read_text(str(folder / PIPELINE)), PIPELINE)
    except ConfigError:
        return []
    named = [name for name in entries if not name.startswith("_") and (folder / name).is_dir()]
    return sorted(name for name in named if any((folder / name).glob("*.safetensors")))


@checked
def quantize_pipeline(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    configs: Mapping[str, ConfigLike],
    *,
    max_shard_size: int | str = "5GB",
    progress: Progress = None,
) -> dict[str, Report]:
    """Quantize components of a pipeline in the layout of diffusers, from files to files.

    Each component is done by `quantize_checkpoint`; other components, the scheduler and `model_index.json`
    are copied. `DiffusionPipeline.from_pretrained` loads the result. Killed and called again, it goes on.

    Args:
        src: the folder of the pipeline; not changed.
        dst: the folder to write.
        configs: name of a component -> a configuration, or the name of a recipe.
        max_shard_size: as for `quantize_checkpoint`.
        progress: as for `quantize_checkpoint`.

    Returns:
        The report on each component that was quantized.

    Raises:
        ConfigError: a component is not one of the pipeline, none is given, or `dst` is `src`, in it, or has
            another pipeline.
        CheckpointError: `src` is no pipeline, or a component cannot be quantized.
    """
    source, target = Path(src), Path(dst)
    if not (known := components_of(source)):
        raise CheckpointError(
            f"{source}: there is no {PIPELINE} with components that have safetensors files"
        )
    _check(source, target, configs, known)
    resolved = {name: resolve_config(config) for name, config in configs.items()}
    target.mkdir(parents=True, exist_ok=True)
    _copy(source, target, leave=set(configs))
    reports = {}
    for name, config in resolved.items():
        made = _made(target / name, config)
        reports[name] = made or quantize_checkpoint(
            source / name, target / name, config, max_shard_size=max_shard_size, progress=progress
        )
    _copy_file(source / PIPELINE, target / PIPELINE)  # last: with it, the pipeline is whole
    return reports


def _check(source: Path, target: Path, configs: Mapping[str, Any], known: list[str]) -> None:
    """Raise `ConfigError` for names and places that cannot work, before anything is written."""
    if not configs:
        raise ConfigError(
            f"configs={{}}: name components to quantize; there are {', '.join(known)}"
        )
    for name in configs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"configs has {name!r}, which is no component with safetensors files in {source}; there are "
                f"{', '.join(known)}.{hint}"
            )
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"dst={str(target)!r} is in src; choose another directory")
    if (target / PIPELINE).exists():
        raise ConfigError(f"dst={str(target)!r} has a pipeline already; choose another directory")


def _made(folder: Path, config: Config) -> Report | None:
    """The report of a component that a run has finished which was killed later."""
    if not_a_file(folder / "ao_manifest.json") or (folder / ".quantizing").exists():
        return None
    report = Report.from_json(read_text(str(folder / "ao_report.json")))
    if report.config != config_to_dict(config):
        raise ConfigError(
            f"dst={str(folder.parent)!r} has {folder.name} quantized by {report.config.get('name')!r}; "
            "choose another directory"
        )
    return report


def _copy(source: Path, target: Path, leave: set[str]) -> None:
    """Copy all files but those of some folders, the list of components, and what is hidden."""
    for file in sorted(source.rglob("*")):
        place = file.relative_to(source)
        hidden = any(part.startswith(".") for part in place.parts)
        if hidden or place.parts[0] in leave or str(place) == PIPELINE or not_a_file(file):
            continue
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        _copy_file(file, target / place)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file at once."""
    unfinished = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)
