"""Masks stay with a model: through training, state dicts, files and copies."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from ao_core import load_model, quantize_, save_model, weight_only
from ao_core.ext import ConfigError, QuantizationError
from ao_sparsity import (
    Blocks,
    NofM,
    Pruning,
    Unstructured,
    apply_fake_sparsity,
    apply_masks,
    attach_masks,
    block_sparse_weight,
    keep_masks,
    prune_magnitude,
    prune_sparsegpt,
    prune_wanda,
    remove_masks,
    semi_sparse_weight,
    sparsify_,
)

MASKS = ["0.weight_sparsity_mask", "2.weight_sparsity_mask"]


def train(model, optimizer, data, steps=5):
    for step in range(steps):
        optimizer.zero_grad()
        model(data[step % len(data)]).square().mean().backward()
        optimizer.step()


def zeros_are_masked(model):
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        if not torch.equal(layer.weight == 0, ~layer.weight_sparsity_mask):
            return False
    return True


def test_masks_are_applied_in_place(model, data):
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    found = prune_magnitude(model, NofM(2, 4))
    apply_masks(model, found)
    for name, (parameter, values) in before.items():
        assert model.get_parameter(name) is parameter
        kept = found.masks.get(name, torch.ones_like(values, dtype=torch.bool))
        assert torch.equal(parameter, values.masked_fill(~kept, 0))
    assert zeros_are_masked(model)
    found = prune_sparsegpt(model, data, NofM(1, 4))
    apply_masks(model, found)
    assert torch.equal(model[0].weight, found.weights["0.weight"])
    assert torch.equal(model[0].weight_sparsity_mask, found.masks["0.weight"])


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.AdamW(ps, 0.05, weight_decay=0.1),
        lambda ps: torch.optim.Adadelta(ps),
    ],
    ids=["sgd", "adamw", "adadelta"],
)
def test_no_momentum_brings_weights_back(make, model, data):
    optimizer = make(model.parameters())
    train(model, optimizer, data)  # momentum for all
    apply_masks(model, prune_magnitude(model, Unstructured(0.6)))
    free = copy.deepcopy(model)
    other = make(free.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(free, other, data)
    assert not zeros_are_masked(free)
    before = model[0].weight.detach().clone()
    with keep_masks(model, optimizer):
        for _ in range(4):
            train(model, optimizer, data, 1)
            assert zeros_are_masked(model)
            assert bool((model[0].weight.grad[~model[0].weight_sparsity_mask] == 0).all())
    mask = model[0].weight_sparsity_mask
    assert bool((model[0].weight != before)[mask].all())
    train(model, optimizer, data)  # nothing keeps them any more
    assert not zeros_are_masked(model)


def test_state_dict_round_trip(model, data):
    plain = copy.deepcopy(model)
    apply_masks(model, prune_magnitude(model, NofM(2, 4)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert [key for key in state if "mask" in key] == MASKS
    assert attach_masks(plain, state) == ["0.weight", "2.weight"]
    plain.load_state_dict(state)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with keep_masks(plain, optimizer):
        train(plain, optimizer, data)
    assert zeros_are_masked(plain)
    twin = copy.deepcopy(plain)
    assert zeros_are_masked(twin)
    assert twin[0].weight_sparsity_mask is not plain[0].weight_sparsity_mask


def test_save_model_and_load_model(model, tmp_path):
    plain = copy.deepcopy(model)
    apply_masks(model, prune_magnitude(model, NofM(2, 4)))
    save_model(model, tmp_path / "model")
    attach_masks(plain, model.state_dict())
    load_model(plain, tmp_path / "model")
    for key, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value)


def test_remove_masks_makes_them_permanent(model):
    keys = list(model.state_dict())
    found = prune_magnitude(model, NofM(2, 4))
    apply_masks(model, found)
    with torch.no_grad():
        model[0].weight.add_(1.0)  # something that nothing kept
    assert remove_masks(model) == ["0.weight", "2.weight"]
    assert list(model.state_dict()) == keys
    assert remove_masks(model) == []
    assert bool((model[0].weight[~found.masks["0.weight"]] == 0).all())
    report = quantize_(model, weight_only("int8"))
    assert len(report.with_status("changed")) == 2
    back = model[0].weight.dequantize()
    assert bool((back[~found.masks["0.weight"]] == 0).all())


@pytest.mark.parametrize(
    ("pattern", "config"),
    [(NofM(2, 4), semi_sparse_weight()), (Blocks(0.5, size=(8, 8)), block_sparse_weight(8))],
)
def test_sparse_layouts_hold_what_was_pruned(pattern, config, model, data):
    apply_masks(model, prune_wanda(model, data, pattern, scope="layer"))
    remove_masks(model)
    pruned = copy.deepcopy(model)
    for record in sparsify_(model, config).with_status("changed"):
        before = pruned.get_parameter(record.fqn)
        assert torch.equal(model.get_parameter(record.fqn).dequantize(), before)
        assert record.bytes_after < 0.75 * record.bytes_before


def test_tied_weights_have_one_mask(data):
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    model[2].weight = model[0].weight
    found = prune_magnitude(model, NofM(2, 4))
    assert list(found.masks) == ["0.weight"]
    assert found.report.with_status("pruned")[0].tied == ("2.weight",)
    apply_masks(model, found)
    assert model[2].weight is model[0].weight
    sparse = prune_sparsegpt(model, [torch.randn(30, 20)], NofM(1, 4))
    assert list(sparse.masks) == ["0.weight"]
    assert model[2].weight is model[0].weight


def test_fake_sparsity(model):
    plain = copy.deepcopy(model)
    report = apply_fake_sparsity(model)
    assert report.removed == 37 * 26 + 19 * 18  # the last of 37 is a group by itself, and stays
    assert not list(model.buffers())
    assert apply_fake_sparsity(plain, Unstructured(0.9)).sparsity == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"0.weight": torch.ones(37, 51, dtype=torch.bool)}, r"\[37, 51\]; need torch.bool \[37, 52\]"),
        ({"0.weight": torch.ones(37, 52)}, "is torch.float32"),
        ({"0.weight": None}, "is None"),
        ({"1.weight": torch.ones(1, dtype=torch.bool)}, "has no such parameter"),
        ({"x.y": torch.ones(1, dtype=torch.bool)}, "has no such parameter"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit(masks, message, model, same):
    unchanged = same(model)
    fine = {"2.weight": torch.zeros(19, 37, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=message):
        apply_masks(model, fine | masks)
    unchanged()
    state = {f"{name}_sparsity_mask": mask for name, mask in (fine | masks).items()}
    with pytest.raises(ConfigError, match=message):
        attach_masks(model, state)
    unchanged()


def test_masks_for_quantized_weights(model):
    found = prune_magnitude(model, NofM(2, 4))
    assert isinstance(found, Pruning)
    quantize_(model, weight_only("int8"))
    with pytest.raises(QuantizationError, match=r"0\.weight is a QTensor"):
        apply_masks(model, found)
