"""A folder of one project to a folder of another, one weight at a time, with a verdict on each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core import __version__
from ao_core.ext import CheckpointError, ConfigError, checked, registry
from ao_core.ext.interchange import Container, Interchange, copied_files, header_of, write_file
from ao_core.ext.quantizing import Progress, watched
from ao_core.ext.saving import natural, parse_size, spec_of
from ao_quant.interchange.journal import Done, Journal
from ao_quant.interchange.one import Keep, Stored, convert_weight
from ao_quant.interchange.sources import OWN, Opened, formats, open_foreign
from ao_quant.interchange.verdicts import EXIT_CODES, Verdict, worst

__all__ = ["REPORT", "Conversion", "convert_checkpoint"]

_WORK = ".converting"
REPORT = "ao_interchange.json"
#: files that say how the source is quantized; the result has its own
_LABELS = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "config.json",
    REPORT,
)


@dataclass(frozen=True)
class Conversion:
    """What became of a checkpoint; `str()` is a table."""

    #: names of the formats
    source: str
    target: str
    #: what made the source one of its format
    why: str
    verdicts: tuple[Verdict, ...]
    #: tensors that are as they were and that ao does not know the meaning of
    unknown: tuple[str, ...] = ()
    #: what was not as labels said
    notes: tuple[str, ...] = ()
    #: the label of the source, which the result has no more
    label: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> str:
        """The worst one."""
        return worst(list(self.verdicts))

    @property
    def exit_code(self) -> int:
        """0: values are equal, 3: some are not, 4: some weights were refused and stay dense."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "source": self.source,
            "target": self.target,
            "why": self.why,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "unknown": list(self.unknown),
            "label": dict(self.label or {}),
            "weights": [verdict.to_dict() for verdict in self.verdicts],
        }

    def __str__(self) -> str:
        counts = {name: sum(v.verdict == name for v in self.verdicts) for name in EXIT_CODES}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines = [f"{self.source} ({self.why}) to {self.target}: {told or 'no quantized weight'}"]
        for each in self.verdicts:
            error = (
                "" if each.sqnr is None else f" max error {each.max_error:.3g}, {each.sqnr:.1f} dB"
            )
            reason = f" {each.reason}" if each.reason else ""
            lines.append(f"  {each.name}: {each.verdict}{error}{reason}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"kept as it is, meaning unknown: {name}" for name in self.unknown]
        return "\n".join(lines)


@checked
def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None,
    to: str,
    *,
    source_format: str = "",
    max_shard_size: int | str = "5GB",
    progress: Progress = None,
) -> Conversion:
    """Convert a quantized checkpoint, one weight at a time; the source stays as it is.

    Every weight is read back from what was written and compared with the source. A weight that the target
    cannot hold at all is stored dense; see `Verdict`. Dense tensors, other files and tensors of unknown
    meaning are copied. A conversion that was killed goes on when it is called again.

    Args:
        src: a folder, an index or a safetensors file, of any known format or of ao.
        dst: the folder to write, new or empty; None: write nothing, and tell what would become of it.
        to: the name of a format, or "ao".
        source_format: the name of that of the source; empty: found out by its tensors.
        max_shard_size: as for `save_model`.
        progress: True shows a bar, a function is called as (done, total, name of the next tensor).

    Raises:
        CheckpointError: the source is damaged or cannot be read, or a disk is full: call again to go on.
        ConfigError: `dst` has files or is `src`, or an unfinished conversion of something else.
        UnknownNameError: no format has such a name.
    """
    limit = parse_size(max_shard_size)
    opened = open_foreign(src, source_format)
    target = None if to == OWN else _format(to)
    if opened.reading.refused:
        name, reason = next(iter(opened.reading.refused.items()))
        raise CheckpointError(f"{src}: {name}: {reason}")
    if dst is None:
        told = _stored(opened, target, progress, set(), [])
        return _conversion(opened, to, [s.verdict for _, s in told if isinstance(s, Stored)])
    place = Path(dst)
    _check_place(Path(src), place)
    try:
        return _written(opened, target, to, place, limit, progress)
    except OSError as error:
        raise CheckpointError(
            f"{place}: could not write: {error.strerror or error}. What is done is kept in "
            f"{place / _WORK}: convert again to go on"
        ) from error


def _format(name: str) -> Interchange:
    formats()
    return registry.interchange.get(name)


def _check_place(src: Path, place: Path) -> None:
    folder = src if src.is_dir() else src.parent
    if place.resolve() == folder.resolve() or place.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"dst={place} is in the source, which stays as it is; choose another folder"
        )
    if place.exists() and not place.is_dir():
        raise ConfigError(f"dst={place} is a file; choose a folder")
    others = [file.name for file in place.iterdir() if file.name != _WORK] if place.exists() else []
    if others and not (place / _WORK).exists():
        raise ConfigError(
            f"dst={place} is not empty (it has {', '.join(sorted(others)[:3])}); choose another"
        )


def _conversion(opened: Opened, to: str, verdicts: list[Verdict]) -> Conversion:
    return Conversion(
        opened.name,
        to,
        opened.why,
        tuple(sorted(verdicts, key=lambda verdict: natural(verdict.name))),
        tuple(opened.unknown),
        opened.reading.notes,
        dict(opened.source.quantization) or None,
    )


def _stored(
    opened: Opened,
    target: Interchange | None,
    progress: Progress,
    there: set[str],
    settings: list[tuple[str, Mapping[str, Any]]],
    keep: Keep = lambda tensors: tensors,
) -> Iterator[tuple[str, Stored | Mapping[str, Tensor]]]:
    """(name, what is stored) of all weights and dense tensors that are not there already, in order.

    Weights of the kind that most are of come first: what a format has one of in a checkpoint, such as the
    size of groups, is theirs.
    """
    weights = opened.reading.weights
    kinds = {name: _kind(opened, name) for name in weights}
    count = Counter(kinds.values())
    names = [
        *sorted(weights, key=lambda name: (-count[kinds[name]], kinds[name], natural(name))),
        *sorted(opened.dense, key=natural),
    ]
    left = [name for name in names if name not in there]
    take = opened.source.take

    def fits(used: Mapping[str, Any]) -> None:
        if target is not None and settings:
            target.config(dict([settings[0], ("this", used)]), ())

    for name in watched(left, left, progress, "convert"):
        if name not in weights:
            yield name, {name: take(name)}
            continue
        stored = convert_weight(name, weights[name], take, opened.format, target, fits, keep)
        if stored.settings is not None:
            settings.append((name, stored.settings))
        yield name, stored
        del stored  # before the next one is made


def _kind(opened: Opened, name: str) -> str:
    """What a weight has in common with others of the source, before it is read."""
    record = opened.checkpoint.records.get(name)
    told = opened.reading.weights[name].settings if record is None else spec_of(record)
    return str(told)


def _identity(opened: Opened, to: str, limit: int) -> dict[str, Any]:
    """What an unfinished conversion must be of, to go on with it."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in opened.files}
    label = json.dumps(opened.source.quantization, sort_keys=True, default=str)
    told = hashlib.sha256(label.encode()).hexdigest()
    return {"files": files, "label": told, "from": opened.name, "to": to, "limit": limit}


def _noted(note: Path) -> Any:
    """What an unfinished conversion is of; None: there is none, or none that had begun."""
    try:
        return json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _written(
    opened: Opened, target: Interchange | None, to: str, place: Path, limit: int, progress: Progress
) -> Conversion:
    place.mkdir(parents=True, exist_ok=True)
    work = place / _WORK
    identity = _identity(opened, to, limit)
    note = work / "what"
    there = _noted(note)
    if there is not None and there != identity:
        raise ConfigError(
            f"dst={place} has an unfinished conversion of something else in {_WORK}; remove that, or "
            "choose another folder"
        )
    if there is None and work.exists():  # killed before it had begun
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    if not note.exists():
        write_file(note, [json.dumps(identity).encode()])
    journal = Journal(work, limit)
    done = {entry.name for entry in journal.done}
    settings: list[tuple[str, Mapping[str, Any]]] = [
        (e.name, e.settings) for e in journal.done if e.settings is not None
    ]
    for name, stored in _stored(opened, target, progress, done, settings, journal.keep):
        if isinstance(stored, Stored):
            used = None if stored.settings is None else dict(stored.settings)
            verdict = stored.verdict.to_dict()
            record = None if stored.record is None else dict(stored.record)
            journal.add(name, stored.tensors, record=record, settings=used, verdict=verdict)
        else:
            journal.add(name, stored)
        del stored
    verdicts = [Verdict(**entry.verdict) for entry in journal.done if entry.verdict is not None]
    result = _conversion(opened, to, verdicts)
    result = _publish(opened, target, journal, place, result)
    shutil.rmtree(work)
    return result


def _publish(
    opened: Opened, target: Interchange | None, journal: Journal, place: Path, result: Conversion
) -> Conversion:
    """Write the files of tensors, then what is beside them; the configuration comes last."""
    if target is not None and target.container is not None:
        _publish_file(opened, target.container, journal, place, result)
        return result
    if opened.format is not None and opened.format.container is not None:
        notes = opened.format.container.unpack(opened.file, place)
        result = replace(result, notes=(*result.notes, *notes))
    shards = journal.shards()
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    weight_map: dict[str, str] = {}
    total = 0
    for number, name in enumerate(names):
        sizes = journal.finish(number, journal.work / name, _header(opened, target, shards[number]))
        os.replace(journal.work / name, place / name)
        weight_map |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    texts = {REPORT: json.dumps(result.to_dict(), indent=2)}
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    if opened.checkpoint.path.is_dir():
        for file in copied_files(opened.folder):
            if file.name not in _LABELS:
                shutil.copyfile(file, place / file.name)
    texts["config.json"] = json.dumps(
        _config(opened, target, journal.done), indent=2, sort_keys=True
    )
    for name, text in texts.items():
        _put(journal, place, name, text)
    return result


def _put(journal: Journal, place: Path, name: str, text: str) -> None:
    """Write a file of text, which is there when it is whole."""
    (journal.work / name).unlink(missing_ok=True)
    write_file(journal.work / name, [(text + "\n").encode()])
    os.replace(journal.work / name, place / name)


def _publish_file(
    opened: Opened,
    container: Container,
    journal: Journal,
    place: Path,
    result: Conversion,
) -> None:
    """Write the one file that a checkpoint is, and the report."""
    settings = {e.name: e.settings for e in journal.done if e.settings is not None}
    file = place / f"model{container.suffix}"
    container.write(file, journal.source(opened.source), settings, opened.folder)
    _put(journal, place, REPORT, json.dumps(result.to_dict(), indent=2))


def _header(opened: Opened, target: Interchange | None, entries: list[Done]) -> dict[str, str]:
    """The texts in the header of a file."""
    if target is not None:
        return target.metadata({e.name: e.settings for e in entries if e.settings is not None})
    records = {entry.name: entry.record for entry in entries if entry.record is not None}
    if not records:
        return {"format": "pt"}
    raw: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    crcs: dict[str, str] = {}
    for entry in entries:
        raw |= {n: (getattr(torch, dtype), tuple(shape)) for n, (dtype, shape) in entry.raw.items()}
        crcs |= {name: leaf[4][:8] for name, leaf in entry.leaves.items()}
    held = {name for entry in entries for name in (entry.name, *entry.leaves)}
    ties = {name: owner for name, owner in opened.checkpoint.ties.items() if owner in held}
    return header_of(records, ties, raw, crcs)


def _config(opened: Opened, target: Interchange | None, done: list[Done]) -> dict[str, Any]:
    """config.json of the source with another label; what it says of other things stays."""
    config = {
        key: value
        for key, value in opened.source.config.items()
        if key not in ("quantization_config", "compression_config", "quantization")
    }
    settings = {entry.name: entry.settings for entry in done if entry.settings is not None}
    dense = tuple(
        entry.name.removesuffix(".weight")
        for entry in done
        if entry.settings is None and entry.name.endswith(".weight") and _is_matrix(entry)
    )
    if target is None:
        label = {"quant_method": OWN, "version": 1, "ao_core": __version__, "config": _told(opened)}
        return {**config, "quantization_config": label} if settings else config
    if not settings:
        return config
    label = target.config(settings, dense)
    key = "quantization" if target.name == "mlx" else "quantization_config"
    return {**config, key: label}


def _is_matrix(entry: Done) -> bool:
    return len(entry.leaves.get(entry.name, ("", ()))[1]) == 2


def _told(opened: Opened) -> dict[str, Any]:
    """What ao's own label says of the configuration: that it came from elsewhere."""
    return {"name": f"interchange/{opened.name}", "label": dict(opened.source.quantization)}
