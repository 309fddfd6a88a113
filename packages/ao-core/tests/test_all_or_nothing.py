"""`quantize_` changes a model as a whole where it is strict, and else as soon as each kind has been made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import ao_core
from ao_core import WHOLE, Config, FqnToConfig, QTensor, Spec, Target, Transform, quantize_tensor
from ao_core.config import resolve_config
from ao_core.installing import install
from ao_core.registry import registry


@dataclass(frozen=True)
class Breaking(Config):
    """Eight bits per row, and whatever exception the test wants at one weight."""

    at: str = ""
    error: str = "RuntimeError"


class Stopped(BaseException):
    """As KeyboardInterrupt is, which would end the tests."""


_ERRORS = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "Stopped": Stopped}


def _apply(weight: Tensor, config: Breaking, target: Target) -> Tensor:
    if target.fqn == config.at:
        raise _ERRORS[config.error]("in the middle")
    return quantize_tensor(weight, Spec("int8", (1, WHOLE)))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    ao_core.register(Transform(Breaking, "breaking", 1, _apply))
    yield
    registry.transforms._records.pop("breaking")
    registry.transforms._providers.pop("breaking")
    registry._transform_of.pop(Breaking)


class Guarded(nn.Linear):
    """A layer that refuses to be given another weight."""

    closed = False

    def __setattr__(self, name: str, value: object) -> None:
        if self.closed and name == "weight" and isinstance(value, QTensor):
            raise RuntimeError("in the middle")
        super().__setattr__(name, value)


class Moving(nn.Linear):
    """A layer that cannot be moved."""

    def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
        raise RuntimeError("in the middle")


def _model(last: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), last)
    model[3].weight = model[0].weight
    return model


class Before:
    """What a model was, by the identity of all that it holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.held = self._now()
        self.values = {name: value.clone() for name, value in model.state_dict().items()}
        self.text = repr(model)

    def _now(self) -> dict[str, tuple[Tensor, type, str]]:
        tensors = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        return {name: (tensor, type(tensor), tensor.device.type) for name, tensor in tensors}

    def check(self) -> None:
        now = self._now()
        assert now.keys() == self.held.keys()
        for name, (tensor, *rest) in now.items():
            assert tensor is self.held[name][0], name
            assert rest == list(self.held[name][1:]), name
            assert torch.equal(tensor, self.values[name]), name
        for module in self.model.modules():
            if isinstance(module, nn.LSTM):
                assert all(
                    a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True)
                )
        assert repr(self.model) == self.text


@pytest.mark.parametrize("error", _ERRORS)
def test_a_transform_that_raises(error: str) -> None:
    model = _model(nn.Linear(8, 4))
    before = Before(model)
    with pytest.raises(_ERRORS[error], match="in the middle"):
        ao_core.quantize_(model, Breaking("4.weight", error))
    before.check()
    ao_core.quantize_(model, Breaking())
    assert isinstance(model[4].weight, QTensor)


def test_a_progress_function_that_raises() -> None:
    """Strict, while weights are tried nothing has changed; later each is whole, and the next call goes on."""
    model = _model(nn.Linear(8, 4))
    before = Before(model)
    quantized = []

    def stop_at(share: float) -> Callable[[int, int, str], None]:
        def stop(done: int, total: int, name: str) -> None:
            quantized.append(any(isinstance(p, QTensor) for p in model.parameters()))
            if done >= share * total:
                raise Stopped("in the middle")

        return stop

    for share in (0.0, 0.3, 0.5):
        with pytest.raises(Stopped):
            ao_core.quantize_(model, Breaking(), progress=stop_at(share), strict=True)
        before.check()
    assert not any(quantized)
    with pytest.raises(Stopped):
        ao_core.quantize_(model, Breaking(), progress=stop_at(1), strict=True)
    assert isinstance(model[4].weight, QTensor)
    assert not ao_core.quantize_(model, Breaking(), strict=True).with_status("changed")


@pytest.mark.parametrize("strict", [False, True])
def test_memory_holds_the_model_and_one_weight(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are weights in memory, dense and quantized, whenever one was made."""
    model = nn.Sequential(*[nn.Linear(13, 17) for _ in range(6)])
    made = []

    def count(dense: Tensor, new: Tensor) -> None:
        gc.collect()
        held = [o for o in gc.get_objects() if type(o) in (QTensor, nn.Parameter)]
        parts = [o.qdata if isinstance(o, QTensor) else o for o in held if o.shape == (17, 13)]
        memory = {part.data_ptr() for part in parts}
        made.append(len(memory))

    monkeypatch.setattr("ao_core.quantize.sample_sqnr", count)
    ao_core.quantize_(model, Breaking(), strict=strict)
    assert len(made) == (12 if strict else 6)
    assert set(made) == {7}


def test_the_second_of_a_kind_that_raises() -> None:
    """What came before it is whole, and the next call goes on; strict, nothing has changed."""
    model = _model(nn.Linear(8, 8))
    before = Before(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        ao_core.quantize_(model, Breaking("4.weight"), strict=True)
    before.check()
    with pytest.raises(RuntimeError, match="in the middle"):
        ao_core.quantize_(model, Breaking("4.weight"))
    assert isinstance(model[0].weight, QTensor)
    assert type(model[4].weight) is nn.Parameter
    ao_core.quantize_(model, Breaking())
    assert isinstance(model[4].weight, QTensor)


def test_weights_are_replaced_one_by_one() -> None:
    """Of many alike, no more than one is held in both forms."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    quantized = []

    def count(done: int, total: int, name: str) -> None:
        quantized.append(sum(isinstance(layer.weight, QTensor) for layer in model))

    ao_core.quantize_(model, Breaking(), progress=count, filter_fn=lambda m, n: n != "0")
    assert quantized == sorted(quantized)
    assert len(set(quantized)) == 6


@pytest.mark.parametrize("config", ["breaking", "rowwise_training"])
@pytest.mark.usefixtures("rowwise_training")
def test_a_module_that_refuses_its_new_weight(config: str) -> None:
    """Also what was exchanged in place, for optimizers, is put back."""
    layer = Guarded(8, 4)
    model = _model(layer)
    before = Before(model)
    layer.closed = True
    with pytest.raises(RuntimeError, match="in the middle"):
        ao_core.quantize_(model, FqnToConfig({"4": Breaking(), "*": resolve_config(config)}))
    before.check()


def test_a_model_that_cannot_be_moved() -> None:
    model = _model(Moving(8, 4))
    before = Before(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        install(model, [], "meta")
    before.check()
    with pytest.raises(RuntimeError, match="in the middle"):
        ao_core.quantize_(model, Breaking(), device="cpu", strict=True)
    before.check()
