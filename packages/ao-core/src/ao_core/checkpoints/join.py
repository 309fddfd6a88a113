"""From pieces to the files of the result, byte for byte as `save_model` writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ao_core.checkpoints.pieces import Piece
from ao_core.checkpoints.progress import Advance
from ao_core.checkpoints.state import ShardState
from ao_core.errors import ConfigError
from ao_core.tensor.saving.commit import Written
from ao_core.tensor.saving.header import header_of
from ao_core.tensor.saving.shards import file_header, open_shard, write_file

__all__ = ["hash_of", "join", "shards_of", "written"]

_BUFFER = 1 << 20


def shards_of(pieces: Sequence[Piece], limit: int) -> tuple[ShardState, ...]:
    """The tensors of each file of at most `limit` bytes, as `write_checkpoint` divides them.

    Raises:
        ConfigError: two tensors would be stored under one name.
    """
    shards: list[ShardState] = []
    names: list[str] = []
    size, seen = 0, set[str]()
    for piece in pieces:
        for record in piece.report:
            entry = piece.entries[record.fqn]
            if twice := seen.intersection(entry.leaves):
                raise ConfigError(
                    f"two tensors would be stored as {min(twice)!r}; exclude the one that would be "
                    "changed"
                )
            seen.update(entry.leaves)
            if names and size + entry.nbytes > limit:
                shards.append(ShardState(tuple(names), size))
                names, size = [], 0
            names.append(record.fqn)
            size += entry.nbytes
    return (*shards, ShardState(tuple(names), size))


def join(
    path: Path,
    tensors: Sequence[str],
    piece_of: Mapping[str, Piece],
    ties: Mapping[str, str],
    advance: Advance,
) -> str:
    """Write and sync a file of these tensors; returns its SHA-256.

    Args:
        path: what is there is replaced.
        tensors: by name, in order.
        piece_of: the piece that has it, for each tensor.
        ties: names that stand for another's tensor, in the whole checkpoint.
        advance: is told of the bytes that are written.

    Raises:
        OSError: it cannot be written.
        CheckpointError: a piece is damaged.
    """
    home = {leaf: piece_of[fqn] for fqn in tensors for leaf in piece_of[fqn].entries[fqn].leaves}
    records = {n: piece_of[n].records[n] for n in tensors if n in piece_of[n].records}
    metadata = header_of(
        records,
        {name: owner for name, owner in ties.items() if owner in home or owner in records},
        {leaf: piece.raw[leaf] for leaf, piece in home.items() if leaf in piece.raw},
        {leaf: piece.crcs[leaf] for leaf, piece in home.items()},
    )
    header, order = file_header({leaf: p.forms[leaf] for leaf, p in home.items()}, metadata)
    sha = hashlib.sha256()

    def buffers() -> Iterator[bytes]:
        sha.update(header)
        yield header
        for leaf in order:
            for data in home[leaf].read(leaf):
                sha.update(data)
                yield data
                advance(leaf, len(data))

    path.unlink(missing_ok=True)
    write_file(path, buffers())
    return sha.hexdigest()


def written(path: Path) -> Written:
    """What the index says of a file."""
    shard = open_shard(path)
    sizes = {name: slot.nbytes for name, slot in shard.slots.items()}
    return Written(sizes, str(shard.header.crc32))


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_BUFFER):
            sha.update(data)
    return sha.hexdigest()
