"""What `ao quantize` does between its arguments and its output."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ao_core.cli.skeleton import make_skeleton
from ao_core.config import Config, config_to_dict
from ao_core.errors import CheckpointError, ConfigError
from ao_core.quantize import convert
from ao_core.report import ParameterRecord, Report
from ao_core.targets import Plan, plan
from ao_core.tensor import QTensor, check_quantizable
from ao_core.tensor.saving import Checkpoint, open_checkpoint, write_checkpoint

__all__ = ["check_paths", "convert_checkpoint", "write_report"]

#: what stands beside the weights and belongs to the model: configuration, tokenizer, code, card
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "LICENSE*")
_INDEX = "*.index.json"


def check_paths(source: Path, target: Path, report: Path | None, overwrite: bool) -> None:
    """Raise before any work is done where its result could not be written."""
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such directory or file")
    folder = source if source.is_dir() else source.parent
    if target.resolve() == folder.resolve():
        raise ConfigError(f"DST {target} is where SRC is; choose another directory")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"DST {target} is a file; choose a directory")
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise ConfigError(
            f"DST {target} is not empty; choose another directory or pass --overwrite"
        )
    if report is not None:
        _render(Report({}), report, "")
        if not report.absolute().parent.is_dir():
            raise ConfigError(f"--report {report}: there is no directory {report.parent}")


def convert_checkpoint(
    source: Path,
    target: Path,
    config: Config,
    include: Sequence[str],
    exclude: Sequence[str],
    max_shard_size: str,
    progress: Callable[[int, int, str], None],
) -> Report:
    """Quantize a checkpoint into another; holds a file of the result and one tensor in memory.

    Raises:
        CheckpointError: the source cannot be read or the target not written.
        ConfigError: a pattern or the configuration matches nothing, or a pattern is invalid.
        QuantizationError: a weight has NaN or inf values. Nothing is written in any of these cases.
    """
    checkpoint = open_checkpoint(source)
    skeleton = make_skeleton(checkpoint)
    plans = plan(skeleton, config, (lambda module, fqn: True) if include else None)
    plans = _choose(plans, include, exclude)
    records: list[ParameterRecord] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, entry in enumerate(plans):
            progress(done, len(plans), entry.fqn)
            tensor, record = _quantize_one(checkpoint, entry)
            records.append(record)
            yield checkpoint.ties.get(entry.fqn, entry.fqn), tensor
        for fqn, _ in skeleton.named_buffers():
            tensor, record = _pass_on(checkpoint, checkpoint.ties.get(fqn, fqn))
            records.append(record)
            yield record.fqn, tensor
        progress(len(plans), len(plans), "")

    write_checkpoint(tensors(), target, ties=checkpoint.ties, max_shard_size=max_shard_size)
    if source.is_dir():
        _copy_side_files(source, target)
    return Report(config_to_dict(config), tuple(records))


def write_report(report: Report, path: Path, title: str) -> None:
    """Write a report in the form that the file's name asks for."""
    path.write_text(_render(report, path, title), encoding="utf-8")


def _render(report: Report, path: Path, title: str) -> str:
    if path.suffix == ".html":
        return report.to_html(title)
    if path.suffix == ".json":
        return report.to_json()
    raise ConfigError(f"--report {path}: the name must end in .html or .json")


def _choose(plans: list[Plan], include: Sequence[str], exclude: Sequence[str]) -> list[Plan]:
    """The plans with what the patterns leave out marked as kept."""
    names = [[owner.fqn for owner in entry.owners] for entry in plans]
    included = _matches("--include", include, names)
    excluded = _matches("--exclude", exclude, names)
    chosen = []
    for i, entry in enumerate(plans):
        reason = ""
        if i in excluded:
            reason = "--exclude leaves it out"
        elif include and i not in included:
            reason = "no --include matches it"
        elif not include and (hint := _unlike_a_weight(entry)):
            reason = hint
        chosen.append(
            replace(entry, config=None, reason=reason) if reason and entry.config else entry
        )
    return chosen


def _unlike_a_weight(entry: Plan) -> str:
    """Why a tensor of three dimensions is not taken for the weights of experts."""
    last = entry.owners[0].name
    if entry.tensor.dim() != 3 or last.endswith(("weight", "_proj")) or "experts" in entry.fqn:
        return ""
    return f"its name ends in {last!r}, not in weight or _proj; --include it to quantize it"


def _matches(option: str, patterns: Sequence[str], names: list[list[str]]) -> set[int]:
    """Indices of the tensors one of whose names has a match."""
    found = set()
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{option} {pattern}: no valid regular expression: {error}"
            ) from error
        hits = {i for i, group in enumerate(names) if any(map(regex.search, group))}
        if not hits:
            shown = ", ".join(group[0] for group in names[:5])
            raise ConfigError(f"{option} {pattern}: matches no tensor; there are {shown}, …")
        found |= hits
    return found


def _quantize_one(checkpoint: Checkpoint, entry: Plan) -> tuple[Tensor, ParameterRecord]:
    """Read a tensor and quantize it as planned."""
    dense = checkpoint.load(entry.fqn)
    if entry.config is not None:
        check_quantizable(dense, entry.fqn)
    new, record = convert(entry, dense)
    if new is not None and not isinstance(new, QTensor):
        raise ConfigError(
            f"{type(entry.config).__name__} makes a {type(new).__name__}, whose memory is what it "
            "was: there is nothing to write"
        )
    return dense if new is None else new, record


def _pass_on(checkpoint: Checkpoint, fqn: str) -> tuple[Tensor, ParameterRecord]:
    """Read what is no dense float: integers, masks, weights that are quantized already."""
    tensor, size = checkpoint.load(fqn), checkpoint.entries[fqn].nbytes
    reason = f"its dtype is {tensor.dtype}"
    if isinstance(tensor, QTensor):
        reason = f"it is quantized already ({tensor.spec})"
    tied = tuple(name for name, owner in checkpoint.ties.items() if owner == fqn)
    shape = tuple(tensor.shape)
    return tensor, ParameterRecord(fqn, "kept", reason, shape, size, size, tied=tied)


def _copy_side_files(source: Path, target: Path) -> None:
    for pattern in _SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.match(_INDEX):
                shutil.copyfile(file, target / file.name)
