"""Input steps that were chosen for a dense weight, which whoever quantizes it stores with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ao_core.arguments import check_fields
from ao_core.errors import ConfigError, QuantizationError
from ao_core.layouts import Parts
from ao_core.spec import ROW, Spec
from ao_core.steps import LOW_RANK, SCALE, Step, check_steps
from ao_core.tensor.input_steps import make_step_parts, misfit, step_weight, stepped, unstep_weight
from ao_core.tensor.qtensor import QTensor

__all__ = ["ChosenSteps"]


@dataclass(frozen=True, eq=False)
class ChosenSteps:
    """Input steps S of a dense weight W, which change nothing until it is quantized: then W S⁻¹ is stored.

    Algorithms see W S⁻¹, less what a step "low_rank" takes out, and statistics of S x, so that they need not
    know of steps.
    """

    #: as in `Spec.input`
    steps: tuple[Step, ...]
    #: by what `SCALE` multiplies activations: (K,), or (E, 1, K) where each expert has its own
    in_scale: Tensor | None = None
    #: of the step "low_rank", B (N, r) and A (r, K), with a dimension more for experts
    low_rank: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_steps(self.steps)
        if (self.in_scale is None) == (SCALE in self.steps):
            raise ConfigError("in_scale: it is given where one of the steps is SCALE")
        if (self.low_rank is None) == any(step.kind == LOW_RANK for step in self.steps):
            raise ConfigError("low_rank: it is given where one of the steps is of low rank")

    def then(self, other: ChosenSteps) -> ChosenSteps:
        """These steps, and after them others; two scales in a row are one.

        Raises:
            ConfigError: two steps of one kind.
        """
        part = other.low_rank if self.low_rank is None else self.low_rank
        if self.in_scale is None or other.in_scale is None:
            scale = other.in_scale if self.in_scale is None else self.in_scale
            return ChosenSteps((*self.steps, *other.steps), scale, part)
        if self.steps[-1] != SCALE or other.steps[0] != SCALE:
            check_steps((*self.steps, *other.steps))  # raises
        return ChosenSteps((*self.steps, *other.steps[1:]), self.in_scale * other.in_scale, part)

    def unsuited(self, shape: tuple[int, ...]) -> str | None:
        """Why rows of a weight of this shape cannot go through the steps; None where they can."""
        return misfit(_spec(self.steps), shape)

    def rows(self, x: Tensor, number: int = 0) -> Tensor:
        """S x of activations (..., K) of one matrix."""
        scale = self.in_scale
        if scale is not None and scale.dim() == 3:
            scale = scale[number, 0]
        return stepped(x, self.steps, {} if scale is None else {"in_scale": scale.to(x.device)})

    def weight(self, values: Tensor) -> Tensor:
        """W S⁻¹ of a weight (N, K) or (E, N, K), in its dtype; see `step_weight`."""
        spec = _spec(self.steps)
        return step_weight(values, spec, self._parts(values)).to(values.dtype)

    def unstepped(self, values: Tensor) -> Tensor:
        """Inverse of `weight`."""
        parts = self._parts(values)
        return unstep_weight(values.to, _spec(self.steps), parts, values.dtype)

    def attached(self, q: QTensor) -> QTensor:
        """The tensor of W from a quantized W S⁻¹.

        Raises:
            QuantizationError: the format cannot have the steps, such as two scales.
        """
        try:
            spec = replace(q.spec, input=(*self.steps, *q.spec.input))
        except ConfigError as error:
            raise QuantizationError(str(error)) from error
        return q.like({**q.parts, **self._parts(q)}, spec=spec)

    def _parts(self, like: Tensor) -> Parts:
        shape = tuple(like.shape)
        spec, device = _spec(self.steps), like.device
        return make_step_parts(spec, shape, device, None, self.in_scale, self.low_rank)


def _spec(steps: tuple[Step, ...]) -> Spec:
    """Any format with these steps."""
    return Spec("int8", ROW, input=steps)
