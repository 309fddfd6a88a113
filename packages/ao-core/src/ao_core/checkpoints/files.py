"""Where the result goes, and what goes there besides tensors: other files of the source, reports, hashes."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ao_core.__about__ import __version__
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.join import hash_of
from ao_core.checkpoints.state import write_whole
from ao_core.errors import ConfigError, MissingExtraError
from ao_core.regular_files import not_a_file
from ao_core.report import Report
from ao_core.schema import is_unicode
from ao_core.tensor.saving.checkpoint import open_checkpoint
from ao_core.tensor.saving.commit import sync_dir
from ao_core.tensor.saving.files import leads_out
from ao_core.tensor.saving.hashes import tensor_hashes
from ao_core.tensor.saving.lock import LOCK, Done, Lock, kernels_of, lock_of, read_lock, text_of
from ao_core.tensor.saving.names import MODEL, names_of_files

__all__ = [
    "MANIFEST",
    "PREPARED",
    "REPORT",
    "WORK",
    "check_empty",
    "check_names",
    "check_target",
    "copied_files",
    "copy_files",
    "left_out_files",
    "write_lock",
    "write_manifest",
    "write_reports",
]

#: the directory in the target that an unfinished run leaves
WORK = ".quantizing"
#: the directory there with the transformed checkpoint, until it is quantized
PREPARED = ".preparing"
MANIFEST = "ao_manifest.json"
REPORT = "ao_report"
_OURS = (MANIFEST, LOCK, f"{REPORT}.json", f"{REPORT}.html")
_INDEX = ".index.json"
#: files that hold weights
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack", ".onnx",
    ".onnx_data", ".gguf", ".npz", ".tflite",
)  # fmt: skip


def check_target(src: Path, target: Path) -> None:
    """Raise `ConfigError` where no result can be written, whatever is there."""
    folder = src if src.is_dir() else src.parent
    if target.resolve() == folder.resolve():
        raise ConfigError(f"DST {target} is where SRC is; choose another directory")
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigError(f"DST {target} is a file; choose a directory")
    if src.is_dir() and target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"DST {target} is inside SRC, which stays as it is; choose another place")
    if (target / WORK).is_symlink() or (
        os.path.lexists(target / WORK) and not (target / WORK).is_dir()
    ):
        raise ConfigError(f"DST {target}: {WORK} is there and is not a directory; remove it first")


def check_empty(target: Path) -> None:
    """Raise `ConfigError` where a directory has files, besides those of an unfinished run."""
    found = sorted(file.name for file in target.iterdir()) if target.exists() else []
    if others := [name for name in found if name not in (WORK, PREPARED)]:
        done = f"; {MANIFEST} is there: a run is done" if MANIFEST in others else ""
        raise ConfigError(
            f"DST {target} is not empty (it has {', '.join(others[:3])}{done}); choose another directory "
            "or pass --overwrite (overwrite=True)"
        )


def check_names(job: Job, target: Path) -> None:
    """Raise `ConfigError` where a checkpoint is in a directory that the new one could not replace at once."""
    there = names_of_files(target)
    if there is not None and job.names not in (there, MODEL):
        raise ConfigError(
            f"DST {target} has a checkpoint whose files begin with {there.stem!r}, and those of SRC "
            f"begin with {job.names.stem!r}; choose another directory"
        )


def copied_files(src: Path) -> list[Path]:
    """The files of a directory that are copied: all that hold no weights."""
    return [file for file, reason in _others(src) if not reason]


def left_out_files(src: Path) -> dict[str, str]:
    """The files and directories of a directory that are not copied, and why."""
    return {file.name: reason for file, reason in _others(src) if reason}


def _others(src: Path) -> list[tuple[Path, str]]:
    if not src.is_dir():
        return []
    found = []
    for file in sorted(src.iterdir()):
        if file.name.endswith((".safetensors", _INDEX)) or file.name in _OURS:
            continue  # what the result has of its own
        reason = ""
        if why := not_a_file(file):
            reason = "it is a directory" if file.is_dir() else f"it {why}"
        elif leads_out(file, src):
            reason = "it is a link to a file outside the folder"
        elif not is_unicode(file.name):
            reason = "its name is not a text in UTF-8"
        elif file.name.endswith(_WEIGHTS):
            reason = "it holds weights in another format"
        elif file.name.startswith("."):
            reason = "it is hidden"
        found.append((file, reason))
    return found


def copy_files(src: Path, target: Path) -> None:
    """Copy the other files of the source, each at once."""
    for file in copied_files(src):
        unfinished = target / WORK / "copy.part"
        unfinished.unlink(missing_ok=True)
        shutil.copyfile(file, unfinished)
        with unfinished.open("rb+") as copy:
            os.fsync(copy.fileno())
        os.replace(unfinished, target / file.name)
    sync_dir(target)


def write_reports(report: Report, target: Path, title: str) -> None:
    """Write the report as JSON, and as HTML where Jinja2 is installed; else warn."""
    write_whole(target / f"{REPORT}.json", report.to_json().encode())
    try:
        page = report.to_html(title)
    except MissingExtraError as error:
        warnings.warn(f"{target}: no {REPORT}.html is written: {error}", stacklevel=3)
        return
    write_whole(target / f"{REPORT}.html", page.encode())


def write_lock(job: Job, target: Path) -> None:
    """Write what is needed to reproduce the result, and hashes of all tensors of result and source."""
    found = open_checkpoint(target)
    weights = [(e.spec, e.shape, e.dtype) for e in found.entries.values() if e.spec is not None]
    job = job.first
    options = {
        "include": list(job.include),
        "exclude": list(job.exclude),
        "max_shard_size": job.max_shard_size,
        "modules": job.modules,
        "data": dict(job.drawn),
    }
    done = Done(job.asked, job.digest, kernels_of(weights))
    source = tensor_hashes(job.checkpoint)
    earlier = _earlier(job, source)
    lock = lock_of(
        found,
        [done] if earlier is None else [*earlier.steps, done],
        source=source if earlier is None else earlier.source,
        options=options,
        seeds={"data": job.drawn["seed"]} if "seed" in job.drawn else None,
    )
    write_whole(target / LOCK, text_of(lock).encode())


def _earlier(job: Job, source: Mapping[str, str]) -> Lock | None:
    """The lock of the source, where one replay can do both; None: the source is where it begins.

    Args:
        job: what was done.
        source: hashes of the tensors of the source.
    """
    if not (job.checkpoint.path / LOCK).is_file() or job.include or job.exclude:
        return None
    found = read_lock(job.checkpoint.path)
    chosen = found.options.get("include") or found.options.get("exclude")
    return found if found.steps and not chosen and found.tensors == source else None


def write_manifest(
    job: Job, target: Path, hashes: Mapping[str, str], others: Iterable[str]
) -> None:
    """Write what `verify_checkpoint` compares with.

    Args:
        job: what was done.
        target: the directory.
        hashes: SHA-256 of files that are known already, by name.
        others: names of files that were written besides; some may have been copied first.
    """
    names = {*hashes, *others, *(file.name for file in copied_files(job.checkpoint.path))}
    source = job.first.checkpoint
    files: dict[str, Any] = {}
    for name in sorted(names):
        path = target / name
        sha256 = hashes.get(name) or hash_of(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256}
    manifest = {
        "version": 1,
        "ao_core": __version__,
        "config": job.asked,
        "source": {file.name: file.stat().st_size for file in source.files},
        "files": files,
    }
    write_whole(target / MANIFEST, json.dumps(manifest, indent=2).encode())
