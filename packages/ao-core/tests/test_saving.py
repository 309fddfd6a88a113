"""save_model and load_model: every format comes back bit for bit, in this process and in a new one."""

from __future__ import annotations

import json
import os
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ao_core import WHOLE, QTensor, Spec, load_model, quantize_tensor, save_model
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import CheckpointError, ConfigError
from ao_core.tensor.saving import (
    flat_to_state_dict,
    open_checkpoint,
    state_dict_to_flat,
    write_checkpoint,
)
from ao_core.testing.warm import run_python

SPECS = {
    "int8": Spec("int8", (1, WHOLE)),
    "int4": Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="packed"),
    "nf4": Spec("nf4", (1, 64), Spec("uint8", (1, 16), zero_point="int"), layout="packed"),
    "float8": Spec("f8e4m3", (1, WHOLE)),
    "mxfp4": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "flat": Spec("int8", (256,), layout="flat"),
    "ragged": Spec("int3", (1, 100), layout="packed"),
}


class Model(nn.Module):
    """Tied embeddings, a linear layer a format, bfloat16, buffers of each kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 128)
        self.layers = nn.ModuleDict({name: nn.Linear(128, 40) for name in SPECS})
        self.norm = nn.LayerNorm(40).bfloat16()
        self.head = nn.Linear(128, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        with torch.device("cpu"):
            self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        hidden = sum(layer(x) for layer in self.layers.values())
        return self.norm(hidden.bfloat16()), self.head(x)


def quantized(seed=0):
    torch.manual_seed(seed)
    model = Model()
    for name, layer in model.layers.items():
        q = quantize_tensor(layer.weight.detach(), SPECS[name])
        layer.weight = nn.Parameter(q, requires_grad=False)
    return model


def on_meta():
    with torch.device("meta"):
        return Model()


def outputs(model):
    with torch.no_grad():
        return model(torch.arange(24))


def assert_same(a, b):
    for left, right in zip(outputs(a), outputs(b), strict=True):
        assert torch.equal(left, right)
    for (name, left), (other, right) in zip(
        a.named_parameters(), b.named_parameters(), strict=True
    ):
        assert (name, type(left), left.dtype) == (other, type(right), right.dtype)
        if isinstance(left, QTensor):
            assert left.spec == right.spec
            for (n, x), (m, y) in zip(left.leaves(), right.leaves(), strict=True):
                assert (n, x.dtype) == (m, y.dtype)
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("build", [Model, on_meta], ids=["with values", "meta"])
@pytest.mark.parametrize("size", ["5GB", 8000, 1], ids=["one file", "shards", "a file each"])
def test_every_format_comes_back_bit_for_bit(tmp_path, build, size):
    model, new = quantized(), build()
    save_model(model, tmp_path / "a" / "b", max_shard_size=size)
    assert load_model(new, tmp_path / "a" / "b") == ((), ())
    assert_same(model, new)
    assert new.head.weight is new.embed.weight
    assert isinstance(new.embed.weight, nn.Parameter)
    assert new.embed.weight.requires_grad
    assert not new.layers["int4"].weight.requires_grad
    assert new.steps.item() == 7


@pytest.mark.parametrize("shared", [False, True], ids=["scale", "scale of scales"])
def test_static_activations_come_back(tmp_path, shared):
    act = Spec("int8", (WHOLE, WHOLE), static=True)
    if shared:  # blocks choose their scales, and these share a static one
        act = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE), static=True), layout="plain")
    model, new = nn.Linear(48, 6), nn.Linear(48, 6)
    weight = quantize_tensor(
        model.weight.detach(), Spec("int8", (1, WHOLE), act=act), act_scale=0.02
    )
    model.weight = nn.Parameter(weight, requires_grad=False)
    save_model(model, tmp_path)
    load_model(new, tmp_path)
    x = torch.randn(3, 48)
    assert torch.equal(new(x), model(x))
    assert new.weight.spec == weight.spec


def test_a_new_process_computes_the_same(tmp_path):
    model = quantized()
    save_model(model, tmp_path, max_shard_size=8000)
    script = f"""
        import importlib.util, sys, torch
        spec = importlib.util.spec_from_file_location("this_test", {__file__!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.on_meta()
        module.load_model(model, {str(tmp_path)!r})
        torch.save(module.outputs(model), {str(tmp_path / "out.pt")!r})
    """
    run_python("-c", textwrap.dedent(script), check=True)
    for here, there in zip(outputs(model), torch.load(tmp_path / "out.pt"), strict=True):
        assert torch.equal(here, there)


def test_the_layout_of_files_is_the_usual_one(tmp_path):
    model = quantized()
    save_model(model, tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == ["ao.lock.json", "model.safetensors"]
    save_model(model, tmp_path / "many", max_shard_size=20_000)
    names = sorted(set(os.listdir(tmp_path / "many")) - {"ao.lock.json"})
    index = json.loads((tmp_path / "many" / names[-1]).read_text())
    assert names[-1] == "model.safetensors.index.json"
    count = len(names) - 1
    assert names[:-1] == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert 3 <= count <= 6
    assert set(index["weight_map"].values()) == set(names[:-1])
    stored = {}
    for name in names[:-1]:
        assert (tmp_path / "many" / name).stat().st_size < 20_000 + 8000  # and a header
        shard = load_file(tmp_path / "many" / name)
        assert all(index["weight_map"][tensor] == name for tensor in shard)
        stored |= shard
    assert stored.keys() == index["weight_map"].keys()
    assert stored.keys() == open_checkpoint(tmp_path / "one").slots.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert {"layers.nf4.weight.scale.qdata", "layers.nf4.weight.scale.scale"} < stored.keys()
    assert "head.weight" not in stored
    assert "cache" not in stored
    assert stored["layers.mxfp4.weight.scale"].dtype == torch.float8_e8m0fnu
    assert torch.equal(stored["embed.weight"], model.embed.weight)


def test_saving_again_leaves_only_the_new_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").write_bytes(b"not ours")
    for size, shards in [("1GB", 1), (20_000, 4), (20_000, 4), (9000, 8), ("1GB", 1), ("1GB", 1)]:
        model, new = quantized(seed=shards), on_meta()
        save_model(model, tmp_path, max_shard_size=size)
        load_model(new, tmp_path)
        assert_same(model, new)
        files = set(os.listdir(tmp_path)) - {"ao.lock.json", "config.json", "adapter.safetensors"}
        expected = len(open_checkpoint(tmp_path).files) + (shards > 1)
        assert len(files) == expected
        assert (expected > 1) == (shards > 1)
    assert (tmp_path / "adapter.safetensors").read_bytes() == b"not ours"


def test_a_dense_checkpoint_of_another_program_loads(tmp_path):
    source, target = nn.Linear(5, 3), nn.Linear(5, 3)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    load_model(target, tmp_path)
    assert torch.equal(source.weight, target.weight)
    again = nn.Linear(5, 3)
    load_model(again, tmp_path / "model.safetensors")
    assert torch.equal(source.bias, again.bias)
    assert not open_checkpoint(tmp_path).providers


def test_other_programs_read_dense_tensors_of_every_dtype(tmp_path):
    named = {
        str(dtype): torch.arange(5).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16)
    }
    named |= {"flag": torch.tensor(True), "empty": torch.empty(0, 4)}
    named["f8"] = torch.ones(3).to(torch.float8_e5m2)
    named["e8m0"] = torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu)
    named |= {"c64": torch.ones(3, dtype=torch.complex64), "u16": torch.ones(2, dtype=torch.uint16)}
    write_checkpoint(named.items(), tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == named.keys()
    for name, tensor in named.items():
        assert read[name].dtype == tensor.dtype
        same = tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), same)
        assert read[name].shape == tensor.shape


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2, dtype=torch.complex64),
        torch.tensor(1 + 2j, dtype=torch.complex128),
        torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu),
        torch.arange(3).to(torch.uint16),
        torch.randn(4, 6).t(),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
    ids=["complex64", "complex128 scalar", "e8m0", "uint16", "not contiguous", "conj", "float4"],
)
def test_unusual_buffers_come_back(tmp_path, tensor):
    model, new = nn.Module(), nn.Module()
    model.register_buffer("x", tensor)
    new.register_buffer("x", torch.zeros_like(tensor, device="meta"))
    save_model(model, tmp_path)
    load_model(new, tmp_path)
    assert new.x.dtype == tensor.dtype
    assert new.x.shape == tensor.shape
    same = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(new.x.contiguous().reshape(-1).view(torch.uint8), same)


def test_files_of_a_directory_without_an_index_are_one_checkpoint(tmp_path):
    source, target = quantized(), on_meta()
    state = source.state_dict()
    del state["head.weight"]
    layers = {name: tensor for name, tensor in state.items() if name.startswith("layers.")}
    for name, part in [
        ("layers", layers),
        ("others", {n: state[n] for n in state.keys() - layers}),
    ]:
        flat, metadata = state_dict_to_flat(part)
        save_file(flat, tmp_path / f"{name}.safetensors", metadata=metadata)
    (tmp_path / "._layers.safetensors").write_bytes(b"what a Mac leaves behind")
    load_model(target, tmp_path)
    assert_same(source, target)
    names = [file.name for file in open_checkpoint(tmp_path).files]
    assert names == ["layers.safetensors", "others.safetensors"]


def test_an_open_checkpoint_outlives_the_next_save(tmp_path):
    save_model(quantized(seed=1), tmp_path)
    opened = open_checkpoint(tmp_path)
    save_model(quantized(seed=2), tmp_path)
    assert torch.equal(opened.load("embed.weight"), quantized(seed=1).embed.weight)


def test_what_is_read_is_memory_of_its_own(tmp_path):
    save_model(quantized(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    opened = open_checkpoint(tmp_path)
    first = opened.load("embed.weight")
    kept = first.clone()
    first.zero_()
    assert torch.equal(opened.load("embed.weight"), kept)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
@pytest.mark.parametrize("size", ["5GB", 8000])
def test_files_have_the_mode_of_other_files(tmp_path, size):
    (tmp_path / "other").touch()
    save_model(quantized(), tmp_path, max_shard_size=size)
    assert {file.stat().st_mode for file in tmp_path.iterdir()} == {
        (tmp_path / "other").stat().st_mode
    }


def test_transposed_and_flattened_weights_keep_their_view(tmp_path):
    q = quantize_tensor(torch.randn(6, 32), SPECS["int4"])
    model = nn.ParameterDict(
        {"t": nn.Parameter(q.t(), False), "flat": nn.Parameter(q.clone().view(-1), False)}
    )
    save_model(model, tmp_path)
    new = nn.ParameterDict({"t": torch.empty(32, 6), "flat": torch.empty(192)})
    load_model(new, tmp_path)
    for name in ("t", "flat"):
        assert torch.equal(new[name].dequantize(), model[name].dequantize())
        assert new[name].stored_shape == (6, 32)


class TestTies:
    def test_a_tie_of_the_checkpoint_is_made_in_the_model(self, tmp_path):
        q = nn.Parameter(quantize_tensor(torch.randn(8, 8), SPECS["int8"]), requires_grad=False)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        model[0].weight = model[1].weight = q
        save_model(model, tmp_path)
        new = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        load_model(new, tmp_path)
        assert new[0].weight is new[1].weight
        assert open_checkpoint(tmp_path).ties == {"1.weight": "0.weight"}

    @pytest.mark.parametrize(
        "kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]]
    )
    def test_a_tie_of_the_model_outlives_other_programs(self, tmp_path, kept):
        weight = torch.randn(24, 128)
        state = Model().state_dict()
        del state["embed.weight"], state["head.weight"]
        state |= {name: weight.clone() for name in kept}
        save_file(state, tmp_path / "model.safetensors")
        new = on_meta()
        load_model(new, tmp_path)
        assert new.head.weight is new.embed.weight
        assert torch.equal(new.head.weight, weight)

    def test_different_values_are_not_tied(self, tmp_path):
        model = Model()
        model.head.weight = nn.Parameter(torch.randn(24, 128))
        save_model(model, tmp_path)
        new = on_meta()
        load_model(new, tmp_path)
        assert_same(model, new)
        assert new.head.weight is not new.embed.weight


def test_a_compute_weight_is_saved_dense_and_stays_one(tmp_path):
    def build():
        layer = nn.Linear(32, 16)
        layer.weight = nn.Parameter(ComputeWeight(layer.weight.detach(), SPECS["int8"]))
        return layer

    model, new, dense = build(), build(), nn.Linear(32, 16)
    save_model(model, tmp_path)
    load_model(new, tmp_path)
    load_model(dense, tmp_path)
    assert isinstance(new.weight, ComputeWeight)
    assert new.weight.requires_grad
    assert torch.equal(new.weight.memory, model.weight.memory)
    assert type(dense.weight) is nn.Parameter
    assert torch.equal(dense.weight, model.weight.memory)


def test_a_state_dict_goes_through_any_safetensors_writer(tmp_path):
    model = quantized()
    flat, metadata = state_dict_to_flat(model.state_dict())
    assert "head.weight" not in flat
    save_file(flat, tmp_path / "model.safetensors", metadata=metadata)
    state = flat_to_state_dict(load_file(tmp_path / "model.safetensors"), metadata)
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"] is state["embed.weight"]
    by_state, by_file = on_meta(), on_meta()
    by_state.load_state_dict(state, assign=True)
    by_state.head.weight = by_state.embed.weight  # which assign=True parts
    load_model(by_file, tmp_path)
    assert_same(model, by_state)
    assert_same(model, by_file)


def test_a_state_dict_with_other_values_is_refused():
    with pytest.raises(CheckpointError, match=r"extra is a list.*tensors only"):
        state_dict_to_flat({"w": torch.ones(2), "extra": [1]})


def test_open_checkpoint_tells_what_is_there(tmp_path):
    model = quantized()
    save_model(model, tmp_path, max_shard_size=8000)
    opened = open_checkpoint(tmp_path)
    entry = opened.entries["layers.nf4.weight"]
    assert (entry.shape, entry.dtype, entry.spec) == ((40, 128), torch.float32, SPECS["nf4"])
    assert entry.nbytes == model.layers["nf4"].weight.stored_bytes
    assert opened.entries["norm.weight"].spec is None
    assert opened.nbytes == sum(e.nbytes for e in opened.entries.values())
    assert {(p.kind, p.name, p.dist) for p in opened.providers} >= {
        ("dtype", "nf4", "ao-core"),
        ("dtype", "uint8", "ao-core"),
        ("layout", "packed", "ao-core"),
    }
    assert opened.missing_providers() == []
    q = opened.load("layers.nf4.weight")
    assert torch.equal(q.dequantize(), model.layers["nf4"].weight.dequantize())
    assert torch.equal(opened.load("head.weight"), model.embed.weight)


def test_device_moves_also_what_is_not_in_the_checkpoint(tmp_path):
    save_model(quantized(), tmp_path)
    new = Model().to("meta")
    new.cache = torch.ones(3)
    load_model(new, tmp_path, device="cpu")
    assert {t.device.type for t in (*new.parameters(), *new.buffers())} == {"cpu"}


@pytest.mark.parametrize("size", ["", "-1", "0", "5 parsecs", -3, "GB"])
def test_a_shard_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ConfigError, match="max_shard_size"):
        save_model(nn.Linear(2, 2), tmp_path, max_shard_size=size)
    assert os.listdir(tmp_path) == []
