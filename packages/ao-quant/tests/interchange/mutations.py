"""Damaged checkpoints of every format: flipped bytes, cut files, lying headers and labels.

    python packages/ao-quant/tests/interchange/mutations.py --count 10000 --seed 1 --json mutations.json

With `--json` it goes on with the formats that the file has not yet.

For each one: a right answer or a clear error. A right answer is that of the same bytes undamaged where the
damage changed no value; where it changed values, they are finite numbers in the shape of the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ao_core import Spec, quantize_tensor
from ao_core.ext import AoError
from ao_core.ext.interchange import Interchange, Source
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.interchange.sources import open_foreign

SHAPE = (64, 128)
#: config.json of a model whose weights are of this shape
SIZES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 64,
}  # fmt: skip
#: what formats hold besides integers
FLOATS = {
    "compressed-tensors": Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed"),
    "modelopt": Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed"),
    "mlx": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "torchao": Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed"),
}
_WRONG: tuple[Any, ...] = (None, -1, 0, 3, 2**40, "x", [], {}, 1.5, True, [128, 0])


def undamaged(form: Interchange, place: Path) -> None:
    """A small folder in a format."""
    if form.name == "mxfp4":
        spec = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
        tensor: Any = quantize_tensor(torch.randn(2, *SHAPE), spec).transpose(1, 2)
    else:
        tensor = quantize_tensor(
            torch.randn(SHAPE), Spec("uint4", (1, 64), "float16", "int", "packed")
        )
    written = form.write("m.weight", tensor, {})
    tensors, settings = dict(written.tensors), {"m.weight": written.settings}
    if form.name in FLOATS:
        other = form.write("f.weight", quantize_tensor(torch.randn(SHAPE), FLOATS[form.name]), {})
        tensors, settings["f.weight"] = tensors | dict(other.tensors), other.settings
    if form.container is not None:
        forms = {name: (t.dtype, tuple(t.shape)) for name, t in written.tensors.items()}
        source = Source(forms, dict(written.tensors).__getitem__, {"dtype": "float16", **SIZES})
        if form.name == "gguf":  # whose names are those of a model
            names = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight")
            source = Source(
                dict.fromkeys(names, forms["m.weight"]),
                lambda _: written.tensors["m.weight"],
                source.config,
            )
            settings = dict.fromkeys(names, written.settings)
        form.container.write(place / f"model{form.container.suffix}", source, settings, place)
        return
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        place / "model.safetensors",
        form.metadata(settings),
    )
    config = {"dtype": "float16", "quantization_config": form.config(settings, ())}
    (place / "config.json").write_text(json.dumps(config))


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(path for key, each in inner for path in _paths(each, (*at, key)))]


def _lie(value: Any, draw: random.Random) -> Any:
    """The same data with one value changed, or gone."""
    value = copy.deepcopy(value)
    path = draw.choice(_paths(value)[1:] or [()])
    if not path:
        return value
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if draw.random() < 0.3 and isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder[path[-1]] = draw.choice(_WRONG)
    return value


def damage(place: Path, draw: random.Random) -> str:
    """Change a folder in one way; returns which."""
    file, label = place / "model.safetensors", place / "config.json"
    kind = draw.choice(("flip", "cut", "header", "label", "shape", "values"))
    if not file.exists():
        # of a whole file the header is small: half of the damage is there
        file = draw.choice(sorted(place.iterdir()))
        kind = draw.choice(("flip", "cut", "head"))
    data = bytearray(file.read_bytes())
    if kind == "head":
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(min(len(data), 1200))] = draw.randrange(256)
    elif kind == "flip":
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind in ("header", "shape"):
        header, body = _header(bytes(data))
        names = [name for name in header if name != "__metadata__"]
        if kind == "header":
            header = _lie(header, draw)
        else:
            one, other = draw.choice(names), draw.choice(names)
            header[one]["shape"] = draw.choice((header[other]["shape"], header[one]["shape"][::-1]))
        data = bytearray(_joined(header, body))
    elif kind == "values":
        header, body = _header(bytes(data))
        start, end = header[draw.choice([n for n in header if n != "__metadata__"])]["data_offsets"]
        changed = bytearray(body)
        changed[start:end] = bytes([draw.choice((0, 255, 127))]) * (end - start)
        data = bytearray(_joined(header, bytes(changed)))
    else:
        config = json.loads(label.read_text())
        config["quantization_config"] = _lie(config["quantization_config"], draw)
        label.write_text(json.dumps(config))
    file.write_bytes(data)
    return kind


def check(place: Path) -> str:
    """What reading a folder came to: "read" or "error".

    Raises:
        AssertionError: a tensor is not what its own shape and format say.
    """
    try:
        opened = open_foreign(place)
        for weight in opened.reading.weights.values():
            tensor = weight.make()
            dense = tensor.dequantize(torch.float32)
            assert dense.shape == tensor.shape
            assert dense.numel() <= 64 * sum(SHAPE) ** 2
    except AoError as error:
        if not str(error):
            raise AssertionError(type(error)) from error
        return "error"
    return "read"


def run(form: Interchange, count: int, seed: int) -> dict[str, int]:
    """How many of so many damaged folders were read, and how many refused."""
    draw, counts = random.Random(f"{form.name} {seed}"), {"read": 0, "error": 0}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        undamaged(form, place)
        whole = {file.name: file.read_bytes() for file in place.iterdir()}
        for number in range(count):
            kind = damage(place, draw)
            try:
                counts[check(place)] += 1
            except BaseException as error:
                raise AssertionError(
                    f"{form.name}, {kind}, number {number} of seed {seed}"
                ) from error
            assert {file.name for file in place.iterdir()} == set(whole)
            for name, data in whole.items():
                (place / name).write_bytes(data)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    done = {}
    if options.json and options.json.exists():
        done = json.loads(options.json.read_text())
    for each in INTERCHANGE:
        if options.only in ("", each.name) and each.name not in done:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            told = run(each, options.count, options.seed)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            sys.stdout.write(
                f"{each.name}: {told['read']} read, {told['error']} refused, {grown} MB grown\n"
            )
            sys.stdout.flush()
            done[each.name] = {"seed": options.seed, **told, "grown_mb": grown}
            if options.json:
                options.json.write_text(json.dumps(done, indent=1) + "\n")
