"""`ao inspect` and `ao explain`."""

from __future__ import annotations

import json

import pytest
import torch

from ao_core import Spec, int_dtype
from ao_core.registry import registry
from ao_core.tensor import quantize_tensor
from ao_core.tensor.saving import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    generator = torch.Generator().manual_seed(0)
    spec = Spec("int4", (1, 32), layout="packed")
    weight = torch.randn(48, 64, generator=generator)
    write_checkpoint(
        [
            ("layers.10.weight", quantize_tensor(weight, spec)),
            ("layers.9.weight", weight[:8].bfloat16()),
            ("embed_tokens.weight", quantize_tensor(weight, spec)),
            ("experts.up_proj", quantize_tensor(weight.reshape(2, 24, 64), spec)),
        ],
        tmp_path / "checkpoint",
        ties={"lm_head.weight": "embed_tokens.weight"},
    )
    return tmp_path / "checkpoint"


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A checkpoint in a number format whose plugin has gone since."""
    with monkeypatch.context() as context:
        context.setitem(registry.dtypes._records, "int3x", int_dtype("int3x", 3))
        context.setitem(registry.dtypes._providers, "int3x", "ao-foreign")
        tensor = quantize_tensor(torch.randn(4, 64), Spec("int3x", (1, 64), layout="packed"))
        write_checkpoint([("w", tensor)], tmp_path / "foreign")
    return tmp_path / "foreign"


def test_inspect_table(ao, checkpoint):
    result = ao("inspect", checkpoint)
    assert result.exit_code == 0, result.stderr
    title, header, _, *rows = result.stdout.splitlines()
    assert title == str(checkpoint)
    assert header.split() == ["name", "shape", "format", "size", "bits/weight", "provider"]
    names = [row.split("  ")[0] for row in rows[:4]]
    assert names == [
        "embed_tokens.weight = lm_head.weight",
        "experts.up_proj",
        "layers.9.weight",
        "layers.10.weight",
    ]
    # 4 bits, and a float32 scale for 32 weights
    assert "5.00" in rows[0]
    assert "int4[1×32] scale=float32 packed" in rows[0]
    assert "ao-core" in rows[0]
    assert "16.00" in rows[2]
    assert rows[-1].startswith("4 tensors, 3 quantized, in 1 file(s): 6.8 kB, 5.58 bits per weight")
    # three of 48×64 in float32, and 8×64 in bfloat16
    assert "(37.9 kB if all were dense, 97.3% of it quantized)" in rows[-1]
    by_format = rows[rows.index("by format") + 3 :]
    assert by_format[0].split()[-5:] == ["3", "5.8", "kB", "84.9%", "5.00"]
    assert by_format[1].split() == ["bfloat16", "1", "1.0", "kB", "15.1%", "16.00"]


def test_inspect_json(ao, checkpoint):
    data = json.loads(ao("inspect", checkpoint, "--json").stdout)
    first = data["tensors"][0]
    assert (first["name"], first["tied"]) == ("embed_tokens.weight", ["lm_head.weight"])
    assert Spec.from_dict(first["spec"]) == Spec("int4", (1, 32), layout="packed")
    assert first["bytes"] == 48 * 32 + 48 * 2 * 4
    assert data["totals"]["bytes"] == sum(t["bytes"] for t in data["tensors"])
    assert data["totals"]["coverage_percent"] == pytest.approx(100 * 36 / 37)
    assert [(f["tensors"], f["bytes"]) for f in data["formats"]] == [(3, 5760), (1, 1024)]
    assert data["totals"]["elements"] == 3 * 48 * 64 + 8 * 64
    assert data["files"] == ["model.safetensors"]
    assert data["missing"] == []


def test_inspect_without_the_plugin(ao, foreign):
    result = ao("inspect", foreign)
    assert result.exit_code == 0, result.stderr
    assert "int3x[1×64]" in result.stdout
    assert "ao-foreign" in result.stdout
    assert "missing here: the dtype 'int3x' of ao-foreign; install it: pip install ao-foreign" in (
        result.stdout
    )
    (tensor,) = json.loads(ao("inspect", foreign, "--json").stdout)["tensors"]
    assert tensor["bits_per_weight"] == 3 + 32 / 64


def test_inspect_what_anybody_saved(ao, source):
    result = ao("inspect", source)
    assert result.exit_code == 0, result.stderr
    assert "10 tensors, 0 quantized" in result.stdout


def test_inspect_damage(ao, checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    result = ao("inspect", checkpoint)
    assert result.exit_code == 2
    assert "truncated" in result.stderr


def test_explain_checkpoint(ao, checkpoint):
    result = ao("explain", checkpoint, "--batch", "7")
    assert result.exit_code == 0, result.stderr
    data = json.loads(ao("explain", checkpoint, "--batch", "7", "--json").stdout)
    weights = {w["fqn"]: w for w in data["weights"]}
    assert set(weights) == {"layers.10.weight", "embed_tokens.weight", "experts.up_proj"}
    ops = [(c["op"], c["x_shape"]) for c in weights["embed_tokens.weight"]["calls"]]
    assert ops == [("embedding", [7]), ("linear", [7, 64])]
    (call,) = weights["layers.10.weight"]["calls"]
    names = [c["kernel"] for c in call["candidates"]]
    assert call["winner"] in names
    assert "reference_linear" in names
    assert f"→ {call['winner']} (" in result.stdout
    grouped = [(c["op"], c["x_shape"]) for c in weights["experts.up_proj"]["calls"]]
    assert grouped == [("grouped_linear", [7, 64])]


def test_explain_checkpoint_without_the_plugin(ao, foreign):
    result = ao("explain", foreign)
    assert result.exit_code == 2
    assert "int3x" in result.stderr


@pytest.mark.parametrize("how", [("small4",), ("--config", "small4")])
def test_explain_format(ao, how):
    args = ("--shape", "48,64", "--batch", "1", "--dtype", "float32", "--set", "group_size=16")
    (weight,) = json.loads(ao("explain", *how, *args, "--json").stdout)["weights"]
    assert weight["fqn"] == "small4"
    assert weight["shape"] == [48, 64]
    assert weight["spec"]["block"] == [1, 16]
    (call,) = weight["calls"]
    assert (call["x_shape"], call["x_dtype"]) == ([1, 64], "float32")
    assert call["winner"]
    assert "small4" in ao("explain", *how, *args).stdout


def test_explain_a_device_that_is_not_here(ao):
    result = ao("explain", "small4", "--shape", "48x64", "--device", "cuda", "--json")
    assert result.exit_code == 0, result.stderr
    (weight,) = json.loads(result.stdout)["weights"]
    assert weight["device"] == "cuda"
    assert {c["winner"] for c in weight["calls"]} != {None}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either a checkpoint, or --config"),
        (("smal4",), "Did you mean 'small4'"),
        (("small4", "--shape", "48"), "--shape 48: give two positive numbers"),
        (("small4", "--shape", "48,0"), "--shape 48,0: give two positive numbers"),
        (("small4", "--shape", "48,7"), "Linear of odd width 7"),
        (("small4", "--dtype", "int8"), "--dtype int8: use one of float32"),
        (("small4", "--device", "toaster"), "--device toaster"),
        (("rowwise_training",), "no table of kernels"),
    ],
)
@pytest.mark.usefixtures("rowwise_training")
def test_explain_bad_arguments(ao, args, message):
    result = ao("explain", *args)
    assert result.exit_code == 2
    assert message in result.stderr
