"""Model cards: what the README.md of a folder says of how its weights are quantized.

ao writes one section, between two comments. The rest of a card is its author's, and stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from ao_core import __version__ as core_version
from ao_core import open_checkpoint
from ao_core.ext import CheckpointError, ConfigError
from ao_core.ext.reports import size_text
from ao_core.ext.saving import Checkpoint, read_text
from ao_hf.__about__ import __version__
from ao_hf.method import METHOD

__all__ = ["ANYWHERE", "CARD", "card_of", "load_lines"]

CARD = "README.md"
#: for a name in the line that loads a folder, which may be moved or uploaded
ANYWHERE = "PATH or ORG/NAME"
_BEGIN = "<!-- ao: what was quantized; written anew whenever the weights are -->"
_END = "<!-- ao: end -->"


def load_lines(library: str, kind: str, name: str) -> tuple[str, str]:
    """Lines of Python that load a model by a name, which is a folder or one of the Hub."""
    return f"import ao_hf, {library}", f"model = {library}.{kind}.from_pretrained({name!r})"


def card_of(
    folder: Path,
    config: Mapping[str, Any],
    reasons: Mapping[str, str],
    library: str,
    kind: str,
    *,
    name: str = ANYWHERE,
    base: str | None = None,
    derived: bool = False,
    tags: Sequence[str] = (),
) -> str | None:
    """The model card of a folder: its own with a section on what was quantized, or a new one.

    Args:
        folder: with the weights.
        config: what was done, in the form of `config_to_dict`.
        reasons: why weights were kept, by name; unknown where they are not named.
        library: that loads the folder.
        kind: the class of the model.
        name: of the folder, for the line that loads it.
        base: the name on the Hub of the model that was quantized, if it has one.
        derived: whether the card is a copy of that model's, which names the model before it.
        tags: more of them.

    Returns:
        None, with a warning, where the card that is there is no text, or the weights cannot be opened.
    """
    try:
        there = read_text(str(folder / CARD)) if (folder / CARD).exists() else None
        checkpoint = open_checkpoint(folder)
    except (CheckpointError, ConfigError) as error:
        warnings.warn(f"{folder}: no model card is written: {error}", stacklevel=2)
        return None
    load = "\n".join(load_lines(library, kind, name))
    text = _section(checkpoint, config, reasons, load)
    lineage = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    facts = {"library_name": library, "tags": [METHOD, *_methods(config), *tags], **lineage}
    title = f"{base.rpartition('/')[2] if base else kind}, quantized by ao"
    return _renewed(there, text, title, facts, sure=lineage if derived else None)


def _section(
    checkpoint: Checkpoint, config: Mapping[str, Any], reasons: Mapping[str, str], load: str
) -> str:
    """The Markdown of ao's section.

    Args:
        checkpoint: of the folder.
        config: what was done, in the form of `config_to_dict`.
        reasons: why weights were kept, by name; unknown where they are not named.
        load: lines of Python that load the folder.
    """
    rows = "\n".join(f"| {' | '.join(row)} |" for row in _rows(checkpoint, reasons))
    needs = {f"{p.dist} {p.version}".strip() for p in checkpoint.providers} - {""}
    versions = ", ".join(
        sorted(
            {f"ao-core {core_version}", f"ao-hf {__version__}", f"torch {version('torch')}", *needs}
        )
    )
    return (
        f"{_BEGIN}\n## Quantization\n\n"
        f"The weights are quantized by ao ({', '.join(f'`{name}`' for name in _methods(config))}) "
        f"and stored in safetensors files.\n\n"
        "| format | tensors | weights | before | after |\n| --- | --: | --: | --: | --: |\n"
        f"{rows}\n\n```python\n{load}\n```\n\nMade with {versions}.\n{_END}"
    )


def _rows(checkpoint: Checkpoint, reasons: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """A row for each format, the largest first, and the totals."""
    kinds: dict[str, list[tuple[int, int, int]]] = {}
    for entry in checkpoint.entries.values():
        count = prod(entry.shape)
        if entry.spec is not None:
            kind = f"`{entry.spec}`"
        else:
            reason = reasons.get(entry.fqn, "").replace("|", "/").replace("\n", " ")
            kind = (
                f"kept in {str(entry.dtype).removeprefix('torch.')}{': ' if reason else ''}{reason}"
            )
        kinds.setdefault(kind, []).append((count, count * entry.dtype.itemsize, entry.nbytes))
    for kind, sizes in sorted(kinds.items(), key=lambda pair: -sum(s[1] for s in pair[1])):
        yield kind, *_totals(sizes)
    yield "all", *_totals([size for sizes in kinds.values() for size in sizes])


def _totals(sizes: list[tuple[int, int, int]]) -> tuple[str, ...]:
    count, before, after = (sum(column) for column in zip(*sizes, strict=True))
    return str(len(sizes)), f"{count:,}", size_text(before), size_text(after)


def _methods(config: Mapping[str, Any]) -> list[str]:
    """The names of all configurations in one, each once."""
    found: list[str] = []
    below = (
        (config.get("entries") or {}).values()
        if "entries" in config
        else config.get("sequence", [])
    )
    if not below and isinstance(name := config.get("name"), str):
        found.append(name)
    for each in below:
        found += _methods(each) if isinstance(each, Mapping) else []
    return list(dict.fromkeys(found))


def _renewed(
    card: str | None,
    section: str,
    title: str,
    facts: Mapping[str, Any],
    *,
    sure: Mapping[str, Any] | None = None,
) -> str:
    """A card with ao's section: below what is there, or in the place of an older one.

    Args:
        card: what is there; None: nothing, and the card gets a title.
        section: as `_section` gives it.
        title: of a new card.
        facts: metadata that is added where a card has none of that name; tags are added to its own.
        sure: metadata that is set whatever the card has.
    """
    body = f"# {title}\n" if card is None else card
    if _BEGIN in body and _END in body:
        before, _, rest = body.partition(_BEGIN)
        body = before + section + rest.partition(_END)[2]
    else:
        body = f"{body.rstrip()}\n\n{section}\n"
    return _with_metadata(body, facts, sure or {})


def _with_metadata(card: str, facts: Mapping[str, Any], sure: Mapping[str, Any]) -> str:
    """The card with metadata in front; a card whose own cannot be read is left as it is."""
    import yaml
    from huggingface_hub import ModelCard, ModelCardData

    if not card.startswith("---"):
        data = ModelCardData(**{**facts, **sure})
        return f"---\n{data.to_yaml()}\n---\n\n{card}"
    try:
        made = ModelCard(card)
    except (ValueError, TypeError, yaml.YAMLError):
        return card
    own = made.data
    for name, value in facts.items():
        if name == "tags":
            tags = own.get("tags") or []
            tags = [tags] if isinstance(tags, str) else tags
            own["tags"] = list(dict.fromkeys([*tags, *value]))
        elif own.get(name) is None:
            own[name] = value
    for name, value in sure.items():
        own[name] = value
    return str(made.content)
