"""Wrong options, wrong state dicts and states of other parameters: one error each, and nothing changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ao_optim
from ao_optim import LowBitOptimizer, optimizers

NAMES = optimizers.__all__
NAN, INF = float("nan"), float("inf")


def built(name: str) -> tuple[nn.Parameter, LowBitOptimizer]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(64, 80))
    optimizer = getattr(ao_optim, name)([param])
    param.grad = torch.randn(64, 80)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("value", [NAN, INF, -1.0, "x", None, True, (0.1,)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers(name: str, value: object) -> None:
    cls = getattr(ao_optim, name)
    param = nn.Parameter(torch.zeros(4, 4))
    for option in {"lr", "eps", "weight_decay", "momentum"} & set(cls.known):
        if (name, option) == ("Muon8bit", "eps") or (option == "lr" and value is None):
            continue  # left to the rule; None is the default of lr
        with pytest.raises(ValueError, match=rf"{option}="):
            cls([param], **{option: value})


@pytest.mark.parametrize("betas", [(0.9,), 0.9, "x", None, (0.9, NAN), (0.9, 1.0), (0.9, "x")])
def test_wrong_betas(betas: object) -> None:
    for name in NAMES:
        cls = getattr(ao_optim, name)
        if "betas" in cls.known:
            with pytest.raises(ValueError, match="Invalid beta"):
                cls([nn.Parameter(torch.zeros(4, 4))], betas=betas)


@pytest.mark.parametrize("value", ["x", None, {}, [1], NAN, object(), torch.ones(2, 2)], ids=type)
@pytest.mark.parametrize("name", NAMES)
def test_options_of_another_type(name: str, value: object) -> None:
    """Of those that a rule does not look at too; in a checkpoint as in the constructor."""
    cls = getattr(ao_optim, name)
    param, optimizer = built(name)
    for option, default in cls.known.items():
        if option == "state_format" or default is None or (value is NAN and type(default) is float):
            continue
        if (option == "lr" and value is None) or (isinstance(default, str) and value == "x"):
            continue  # the default; a name that is unknown
        with pytest.raises(ValueError, match=option.removesuffix("s")):
            cls([param], **{option: value})
        if option in ("min_quantized_numel", "rounding", "capturable"):
            continue  # how state is stored, which a checkpoint does not change
        broken = copy.deepcopy(optimizer.state_dict())
        broken["param_groups"][0][option] = value
        with pytest.raises(ValueError, match=rf"param_groups\[0\].*{option.removesuffix('s')}"):
            optimizer.load_state_dict(broken)


@pytest.mark.parametrize("name", NAMES)
def test_options_of_torch_that_change_nothing(name: str) -> None:
    cls = getattr(ao_optim, name)
    param = nn.Parameter(torch.zeros(4, 4))
    cls([param], fused=True, foreach=None, differentiable=False)
    with pytest.raises(TypeError, match="has no option differentiable"):
        cls([param], differentiable=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", "x"),
        ("lr", None),
        ("lr", NAN),
        ("step", -5.0),
        ("step", NAN),
        ("step", "x"),
        ("step", None),
        ("moment", 3),
        ("moment", "x"),
        ("moment", torch.zeros(64, 80, dtype=torch.int64)),
        ("moment", torch.zeros(3, 4)),
        ("moment", torch.zeros(64, 80).to_sparse()),
        ("state", [1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_state_dicts(name: str, field: str, value: object) -> None:
    param, optimizer = built(name)
    before = copy.deepcopy(optimizer.to_full_state())
    broken = copy.deepcopy(optimizer.state_dict())
    said = field
    if field == "lr":
        broken["param_groups"][0]["lr"] = value
    elif field == "state":
        broken["state"][0] = value
    elif field == "step":
        broken["state"][0]["step"] = value
    else:
        said = next(slot.name for slot in optimizer.rule.slots(optimizer.param_groups[0]))
        broken["state"][0][said] = value
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(broken)
    after = optimizer.to_full_state()
    assert after["param_groups"] == before["param_groups"]
    for key, found in after["state"][0].items():
        assert torch.equal(found, before["state"][0][key]), key
    assert optimizer.state[param]


GROUP = {"params": [0]}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (None, "state_dict is a NoneType"),
        ({}, "param_groups=None"),
        ({"state": [1], "param_groups": [GROUP]}, r"state=\[1\]"),
        ({"state": {}}, "param_groups=None"),
        ({"state": {}, "param_groups": [None]}, r"param_groups\[0\]=None"),
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, "list 'params'"),
        ({"state": {}, "param_groups": [{"params": [[0]]}]}, "list 'params'"),
        ({"state": {5: {}}, "param_groups": [GROUP]}, "has 5, which none"),
        ({"state": {0: 3}, "param_groups": [GROUP]}, "not a dict"),
        ({"state": {}, "param_groups": [GROUP, GROUP]}, "different number of parameter groups"),
    ],
)
@pytest.mark.parametrize("name", [*NAMES, "GaLore", "CPUOffloadOptimizer"])
def test_what_is_no_state_dict(name: str, broken: Any, said: str) -> None:
    param, optimizer = built(name)
    before = optimizer.state[param].copy()
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(broken)
    assert optimizer.state[param] == before


@pytest.mark.parametrize(
    ("name", "value"), [("galore_projection", torch.zeros(3, 3)), ("galore_steps", "x")]
)
def test_wrong_projections(name: str, value: object) -> None:
    param = nn.Parameter(torch.randn(64, 80))
    optimizer = ao_optim.GaLore([param], rank=8)
    param.grad = torch.randn(64, 80)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict({**saved, "state": {0: {**saved["state"][0], name: value}}})


@pytest.mark.parametrize("value", ["x", torch.zeros(3), torch.zeros(64, 80, dtype=torch.int8)])
def test_wrong_compensation(value: object) -> None:
    param = nn.Parameter(torch.zeros(64, 80, dtype=torch.bfloat16))
    optimizer = ao_optim.AdamW8bit([param], rounding="kahan")
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["compensation"] = value
    with pytest.raises(ValueError, match="compensation of parameter 0"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_of_another_size(name: str) -> None:
    param, optimizer = built(name)
    param.data = torch.ones(80, 64)
    param.grad = torch.ones(80, 64)
    with pytest.raises(ValueError, match=r"has shape \(64, 80\), but the parameter has \(80, 64\)"):
        optimizer.step()
    assert bool((param == 1).all())


def test_groups_draw_different_noise() -> None:
    params = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    optimizer = ao_optim.SGD8bit(groups, lr=1e-3, rounding="stochastic")
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    assert not torch.equal(*params)


def test_muon_names_what_is_no_matrix() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"\(bias\)\. Give it the matrices"):
        ao_optim.Muon8bit(model.named_parameters())
