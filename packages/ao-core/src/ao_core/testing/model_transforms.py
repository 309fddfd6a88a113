"""`ModelTransformSuite`: what a transform of a whole model must do before its weights are quantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ao_core.calibration.samples import answer
from ao_core.config import Config, config_from_json, config_to_json
from ao_core.errors import AoError, ConfigError
from ao_core.graph.copies import sharing
from ao_core.model_records import ModelTransform, Prepared
from ao_core.numerics import sqnr
from ao_core.quantize import quantize_
from ao_core.recipes import WeightOnlyConfig
from ao_core.registry import registry
from ao_core.targets import Decision, decide
from ao_core.tensor import QTensor
from ao_core.testing.base import Suite, gaussian, same_bits

__all__ = ["ModelTransformSuite"]

#: the error of the outputs of a model that computes the same, relative to them
_SAME = 1e-5
_WIDTH, _HEADS, _HIDDEN, _TOKENS = 32, 4, 48, 50


class Layer(nn.Module):
    """An embedding, attention, a gated MLP and a head, with a norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_TOKENS, _WIDTH), nn.Linear(_WIDTH, _TOKENS, False)
        self.one, self.two, self.last = (nn.RMSNorm(_WIDTH) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.gate, self.up = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_WIDTH, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        heads = [
            each(self.one(x)).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        ]
        x = x + self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        y = self.two(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        found: Tensor = self.head(self.last(x))
        return found


class ModelTransformSuite(Suite):
    """Tests of a transform of models with one of its configurations.

    Attributes:
        config: an instance of the configuration, whose base is not set if it has one.
        base: what quantizes the weights afterwards.
        sqnr_range: what the SQNR of the quantized model's output may be, in dB.
    """

    config: Config
    base: Config = WeightOnlyConfig("int4", 16)
    sqnr_range: tuple[float, float] = (3.0, 60.0)

    @property
    def record(self) -> ModelTransform:
        """The record under test."""
        found = registry.model_transform_for(type(self.config))
        name = type(self.config).__name__
        assert found is not None, f"no transform of models is registered for {name}"
        return found

    def model(self) -> nn.Module:
        """The model that is transformed; others are for suites of transforms for these."""
        model = Layer().eval()
        with torch.no_grad():
            for seed, (name, tensor) in enumerate(model.named_parameters()):
                size = tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1
                noise = gaussian(tensor.shape, seed=seed) * (1.0 if "embed" in name else size)
                tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)
        return model.requires_grad_(False)

    def data(self) -> list[Any]:
        """Batches for the model."""
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(0, _TOKENS, (2, 20), generator=generator) for _ in range(3)]

    def applied(self, model: nn.Module) -> Prepared:
        """What the transform makes of a copy that shares the parameters of the model."""
        copied = sharing(model)
        found: Any = self.record.apply(copied, self.weights(copied), self.data(), self.config)
        name = self.record.name
        assert isinstance(found, Prepared), (
            f"transform of models {name!r} answers a {type(found).__name__}; answer Prepared"
        )
        return found

    def weights(self, model: nn.Module) -> list[Decision]:
        """The weights that are going to be quantized."""
        return [entry for entry in decide(model, self.base, None) if entry.config is not None]

    def _who(self) -> str:
        return f"transform of models {self.record.name!r}"

    def test_record(self) -> None:
        """Its name is that of a method, and its configuration comes back from a file."""
        name = self.record.name
        assert name == name.lower(), f"{self._who()}: its name is not lowercase"
        again = config_from_json(config_to_json(self.config))
        assert again == self.config, f"{self._who()}: its configuration comes back as {again!r}"

    def test_the_model_computes_the_same(self) -> None:
        """The outputs of what it answers are those of the model, for all data."""
        model = self.model()
        made = self.applied(model).model
        for number, batch in enumerate(self.data()):
            expected, found = (answer(each, batch).double() for each in (model, made))
            error = float((found - expected).norm() / expected.norm())
            assert error <= _SAME, (
                f"{self._who()} changes what the model computes: data[{number}] differs by {error:.1e} > "
                f"{_SAME}; prove it with `ao_core.ext.graph`"
            )

    def test_inputs_are_left_alone(self) -> None:
        """Parameters, data and torch's random numbers are what they were, and twice gives the same bits."""
        model, data = self.model(), self.data()
        before = copy.deepcopy(model.state_dict())
        seen, state = copy.deepcopy(data), torch.get_rng_state()
        first = self.applied(model)
        same_state = torch.equal(state, torch.get_rng_state())
        assert same_state, (
            f"{self._who()} changed torch's random numbers; use a generator of its own"
        )
        for name, tensor in model.state_dict().items():
            assert same_bits(tensor, before[name]), (
                f"{self._who()} changes {name} in place; answer a copy of the model with another one"
            )
        assert all(
            same_bits(a, b) for a, b in zip(data, seen, strict=True) if isinstance(a, Tensor)
        )
        again = self.applied(model)
        for name, tensor in first.model.state_dict().items():
            other = again.model.state_dict()[name]
            assert same_bits(tensor, other), f"{self._who()} gives other values of {name} each time"

    def test_steps_and_notes(self) -> None:
        """Steps are of weights that they fit, and notes are sentences about parameters."""
        model = self.model()
        made, weights = self.applied(model), {e.fqn: e for e in self.weights(model)}
        names = dict(made.model.named_parameters(remove_duplicate=False))
        for name, steps in made.steps.items():
            assert name in weights, (
                f"{self._who()} chooses input steps for {name!r}, which is no weight that is quantized"
            )
            shape = tuple(weights[name].tensor.shape)
            reason = steps.unsuited(shape)
            assert reason is None, f"{self._who()}: the steps of {name}, {shape}: {reason}"
        for name, note in made.notes.items():
            assert name in names, f"{self._who()} has a note on {name!r}, which is no parameter"
            words = len(note.split())
            assert words >= 3, f"{self._who()}: the note of {name} is no sentence: {note!r}"

    def test_quantized(self) -> None:
        """Its weights are quantized afterwards, and the report has what was done to them."""
        model, dense = self.model(), self.model()
        report = quantize_(model, [self.config, self.base], data=self.data())
        wanted = {entry.fqn for entry in self.weights(dense)}
        found = {n for n, p in model.named_parameters() if isinstance(p, QTensor)}
        assert wanted <= found, (
            f"{self._who()}: {sorted(wanted - found)} are not quantized afterwards"
        )
        assert any(record.note for record in report), f"{self._who()} says nothing of what it did"
        batch = self.data()[0]
        quality = float(sqnr(answer(dense, batch), answer(model, batch)))
        low, high = self.sqnr_range
        assert low <= quality <= high, (
            f"{self._who()}: the output of the quantized model has {quality:.1f} dB, `sqnr_range` is "
            f"{self.sqnr_range}"
        )

    def test_what_cannot_be(self) -> None:
        """Without data, and after weights were quantized, an error leaves the model as it was."""
        cases: list[tuple[Any, Any]] = [
            ([self.config, self.base], None),
            ([self.base, self.config], self.data()),
        ]
        for config, data in cases:
            model = self.model()
            before = list(model.parameters())
            with pytest.raises((ConfigError, AoError)):
                quantize_(model, config, data=data)
            same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
            assert same, f"{self._who()}: the model is not what it was after an error"
