"""From a folder or a file to what a reader sees, and to the format that it is in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ao_core import QTensor, open_checkpoint
from ao_core.ext import CheckpointError, json_object, registry
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source
from ao_core.ext.saving import Checkpoint, read_text, rebuild

__all__ = ["OWN", "Opened", "formats", "open_foreign"]

#: what ao's own format is called
OWN = "ao"
#: files that say how a folder is quantized, where config.json does not, and the key there
_FILES = {
    "quantize_config.json": "",
    "quant_config.json": "",
    "hf_quant_config.json": "quantization",
}


class Opened(NamedTuple):
    """A checkpoint, the format that it is in, and its weights."""

    source: Source
    checkpoint: Checkpoint
    #: None: it is ao's own, or not quantized
    format: Interchange | None
    #: what made it one of that format
    why: str
    reading: Reading

    @property
    def file(self) -> Path:
        """The file of a container."""
        return self.checkpoint.path

    @property
    def folder(self) -> Path:
        """The folder that it is, or is in."""
        path = self.checkpoint.path
        return path if path.is_dir() else path.parent

    @property
    def files(self) -> tuple[Path, ...]:
        """All that hold tensors."""
        return self.checkpoint.files or (self.checkpoint.path,)

    @property
    def name(self) -> str:
        """Of the format."""
        own = OWN if self.checkpoint.records else "none"
        return own if self.format is None else self.format.name

    @property
    def dense(self) -> list[str]:
        """Plain tensors that belong to no quantized weight, sorted as they are in the checkpoint."""
        taken = {name for weight in self.reading.weights.values() for name in weight.names}
        return [name for name in self.source.forms if name not in taken]

    @property
    def unknown(self) -> list[str]:
        """Those that are beside a quantized weight, or are no numbers of a model: kept as they are."""
        owners = {name.rpartition(".")[0] for name in self.reading.weights}
        return [
            name
            for name in self.dense
            if not name.endswith((".bias", ".weight"))
            and (
                name.rpartition(".")[0] in owners
                or not self.source.forms[name][0].is_floating_point
            )
        ]


def formats() -> dict[str, Interchange]:
    """Every known format, by name."""
    registry.load_plugins()
    return {name: registry.interchange.get(name) for name in sorted(registry.interchange.names())}


def _object(path: Path) -> dict[str, Any]:
    return json_object(read_text(str(path)), path.name) if path.is_file() else {}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What says how a folder is quantized: in config.json, or in a file of its own."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(found := each.get(key), Mapping):
                return dict(found)
    for name, key in _FILES.items():
        found = _object(folder / name)
        if found:
            inner = found.get(key, found)
            return {**inner, "hf_quant": True} if key and isinstance(inner, Mapping) else found
    return {}


def source_of(checkpoint: Checkpoint) -> Source:
    """What a reader sees of a checkpoint."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = _object(folder / "config.json")
    metadata: dict[str, str] = {}
    for slot in {id(slot.file): slot for slot in checkpoint.slots.values()}.values():
        metadata |= slot.file.metadata() or {}
    forms = {name: (slot.dtype, slot.shape) for name, slot in checkpoint.slots.items()}
    return Source(forms, checkpoint.read, config, quantization_of(folder, config), metadata)


def _own(checkpoint: Checkpoint) -> Reading:
    """The weights of ao's own format."""
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")

    def make(name: str) -> QTensor:
        return rebuild(name, checkpoint.records[name], checkpoint.read)

    return Reading(
        {
            name: ForeignWeight(checkpoint.entries[name].leaves, partial(make, name))
            for name in checkpoint.records
        }
    )


def _contained(path: Path, called: str) -> Opened | None:
    """A file that is a whole checkpoint, or the only one of a folder without others; None: it is none."""
    for name, form in formats().items():
        if form.container is None or called not in ("", name):
            continue
        files = [path]
        if path.is_dir():
            files = sorted(path.glob(f"*{form.container.suffix}"))
            files = [] if any(path.glob("*.safetensors")) else files
        if len(files) > 1:
            raise CheckpointError(f"{path} has {len(files)} files of {name}; name one of them")
        if not files or files[0].suffix.lower() != form.container.suffix:
            continue
        source = form.container.open(files[0])
        empty = Checkpoint(files[0], {}, {}, (), {}, {})
        return Opened(source, empty, form, f"it is a file of {name}", form.read(source))
    return None


def open_foreign(path: str | os.PathLike[str], called: str = "") -> Opened:
    """Open a checkpoint of another project, or of ao, and find out what it is.

    Args:
        path: a folder, an index or a safetensors file; or a file of a format that has its own, such as GGUF.
        called: the name of its format; empty: found out by its tensors.

    Raises:
        CheckpointError: it is damaged, or more than one format claims it, or not the one that was named.
        UnknownNameError: no format is called so.
    """
    if (contained := _contained(Path(path), called)) is not None:
        return contained
    checkpoint = open_checkpoint(Path(path))
    source = source_of(checkpoint)
    if checkpoint.records and called in ("", OWN):
        return Opened(source, checkpoint, None, "its header is that of ao", _own(checkpoint))
    if called:
        formats()
        chosen = registry.interchange.get(called)
        claims = {called: chosen.detect(source)}
        if not claims[called]:
            raise CheckpointError(f"{path} is not {called}: {chosen.doc}")
    else:
        found = formats()
        claims = {name: why for name, each in found.items() if (why := each.detect(source))}
    if not claims:
        return Opened(
            source, checkpoint, None, "nothing in it is quantized in a known way", Reading({})
        )
    if len(claims) > 1:
        listed = "; ".join(f"{name}: {why}" for name, why in claims.items())
        raise CheckpointError(f"{path} may be one of several formats ({listed}); name one of them")
    ((name, why),) = claims.items()
    chosen = registry.interchange.get(name)
    return Opened(source, checkpoint, chosen, why, chosen.read(source))
