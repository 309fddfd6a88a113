"""What was pruned or squashed is saved and loaded, in every layout; parts that lie are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ao_core import (
    WHOLE,
    Spec,
    WeightOnlyConfig,
    load_model,
    quantize_,
    quantize_checkpoint,
    quantize_tensor,
    save_model,
)
from ao_core.ext import NO_SCALE, CheckpointError
from ao_core.ext.saving import flat_to_state_dict, state_dict_to_flat
from ao_sparsity import (
    Blocks,
    NofM,
    SupermaskLinear,
    apply_masks,
    block_sparse_weight,
    prune_magnitude,
    remove_masks,
    semi_sparse_weight,
    sparsify_,
    squash_masks,
)

CONFIGS = {
    "bsr": block_sparse_weight(blocksize=16),
    "bsr int8": block_sparse_weight(blocksize=16, dtype="int8"),
    "two_four": semi_sparse_weight(),
    "two_four int8": WeightOnlyConfig("int8", layout="two_four"),
    "two_four f6": WeightOnlyConfig("f6e3m2", 16, "bfloat16", layout="two_four"),
}


def linear(rows=64, columns=80):
    return nn.Sequential(nn.Linear(columns, rows))


def pruned(share, layout):
    """Some of the blocks, or two of every four values, are gone."""
    model = linear()
    pattern = NofM(2, 4) if layout.startswith("two_four") else Blocks(share, size=(16, 16))
    apply_masks(model, prune_magnitude(model, pattern))
    remove_masks(model)
    return model


def squashed(layout):
    model = nn.Sequential(SupermaskLinear.from_dense(linear()[0], blocksize=16, sparsity=0.4))
    squash_masks(model)
    return model


def zeros(layout):
    model = linear()
    model[0].weight.data.zero_()
    return model


WAYS = {
    "dense": lambda layout: linear(),
    "pruned": partial(pruned, 0.3),
    "nearly all": partial(pruned, 0.95),
    "zeros": zeros,
    "squashed": squashed,
}


def same(found, wanted):
    assert type(found) is type(wanted)
    assert found.spec == wanted.spec
    assert torch.equal(found.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
def test_saved_and_loaded(tmp_path, way, layout):
    model, config = WAYS[way](layout).to(torch.bfloat16), CONFIGS[layout]
    save_model(model, tmp_path / "dense")
    quantize_(model, config)
    save_model(model, tmp_path / "model")
    again = linear().to(torch.bfloat16)
    load_model(again, tmp_path / "model")
    weight = model[0].weight
    if not hasattr(weight, "spec"):  # blocks that are all there would only make it larger
        assert torch.equal(again[0].weight, weight)
        return
    same(again[0].weight, weight)
    same(flat_to_state_dict(*state_dict_to_flat(model.state_dict()))["0.weight"], weight)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "files", config)
    load_model(again, tmp_path / "files")
    same(again[0].weight, weight)


def test_the_documented_flow(tmp_path):
    model = pruned(0.5, "bsr")
    sparsify_(model, block_sparse_weight(blocksize=16))
    assert model[0].weight.sparsity == 0.5
    save_model(model, tmp_path)
    load_model(linear(), tmp_path)


def flat(layout, shape=(32, 64), **options):
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[..., :16, :16] = 0
    chosen = tuple(options.items())
    q = quantize_tensor(x, Spec("bf16", (1, WHOLE), NO_SCALE, layout=layout, options=chosen))
    return state_dict_to_flat({"w": q})


def refused(tensors, metadata, name, change, match):
    changed = dict(tensors)
    changed[f"w.{name}"] = change(changed[f"w.{name}"].clone())
    with pytest.raises(CheckpointError, match=match):
        flat_to_state_dict(changed, metadata)


def put(index, value):
    def change(part):
        part[index] = value
        return part

    return change


BLOCKS = [
    ("crow_indices", put(0, 1), "must rise from 0 to 7"),
    ("crow_indices", put(-1, 6), "must rise from 0 to 7"),
    ("crow_indices", put(1, 9), "must rise from 0 to 7"),
    ("crow_indices", lambda part: part.long(), "'crow_indices' is int64"),
    ("crow_indices", lambda part: part[:-1], "'crow_indices' is int32 of shape"),
    ("col_indices", put(0, -1), "must be from 0 to 3"),
    ("col_indices", put(0, 4), "must be from 0 to 3"),
    ("col_indices", put(1, 1), "must rise along each row"),
    ("col_indices", lambda part: part[:-1], "'qdata' is bfloat16 of shape"),
    ("col_indices", lambda part: part.float(), "'col_indices' is float32"),
    ("qdata", lambda part: part[:-1], "'qdata' is bfloat16 of shape"),
    ("qdata", lambda part: part.half(), "'qdata' is float16"),
    ("qdata", lambda part: part[:, :8], "'qdata' is bfloat16 of shape"),
]


@pytest.mark.parametrize(("name", "change", "match"), BLOCKS)
def test_blocks_that_lie(name, change, match):
    refused(*flat("bsr", blocksize=16), name, change, match)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("index", put((0, 0), 0), "the first must be less"),
        ("index", put((0, 0), 0b0001_0100), "the first must be less"),
        ("index", lambda part: part.double(), "'index' is float64"),
        ("index", lambda part: part[:, :-1], "'index' is uint8 of shape"),
        ("qdata", lambda part: part.half(), "'qdata' is float16"),
        ("qdata", lambda part: part[:-1], "'qdata' is bfloat16 of shape"),
    ],
)
def test_positions_that_lie(name, change, match):
    refused(*flat("two_four"), name, change, match)


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (2, 32, 64), (1, 1), (17, 33)])
@pytest.mark.parametrize("layout", ["bsr", "two_four"])
def test_sizes_at_the_ends(layout, shape):
    tensors, metadata = flat(layout, shape)
    assert flat_to_state_dict(tensors, metadata)["w"].shape == shape
