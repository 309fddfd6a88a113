"""Tensor parallelism for layers with float8 matmuls: torch's styles, which send float8 where they can."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from ao_core import Spec
from ao_core.ext import ConfigError
from ao_float8.distributed.communicate import casts_of, gathered, redistributed

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]


class _ParallelLinear(nn.Linear):
    """A linear layer with a sharded weight, whose matmuls are those of the local one.

    So that all three are as its weight says; among `DTensor`s torch would multiply in its own way.
    """

    #: of the output, where the local ones are to be added up
    output_layouts: tuple[Placement, ...]

    def forward(self, input: Tensor) -> Tensor:
        """From and to `DTensor`s."""
        weight: Tensor = self.weight
        assert isinstance(input, DTensor)
        assert isinstance(weight, DTensor)
        by_columns = weight.placements[0].is_shard(0)
        last = input.dim() - 1
        grads: Placement = Partial() if by_columns else Shard(last)
        out = F.linear(input.to_local(grad_placements=(grads,)), weight.to_local())
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        y = DTensor.from_local(
            out,
            weight.device_mesh,
            (Shard(last) if by_columns else Partial(),),
            run_check=False,
            shape=shape,
            stride=_contiguous(shape),
        )
        if not by_columns:
            y = redistributed(y, self.output_layouts, casts_of(weight)[1])
        bias: Tensor | None = self.bias
        return y if bias is None else y + bias


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def _check_linear(style: str, module: nn.Module) -> None:
    if type(module) is not nn.Linear:
        raise ConfigError(
            f"{style} is for nn.Linear, not {type(module).__name__}; use the style of torch for others"
        )


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a layer with float8 matmuls: a sharded input is gathered in float8.

    In float8 where both matmuls that take the input cast it alike, with one scale for the tensor
    (the recipe "tensorwise"); else in high precision. Arguments are those of `ColwiseParallel`.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        return gathered(x, casts_of(mod.weight)[0])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear("Float8ColwiseParallel", module)
        super()._apply(module, device_mesh)
        module.__class__ = _ParallelLinear
        return module


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a layer with float8 matmuls: the gradient of a sharded output likewise.

    With ``output_layouts=Shard(1)`` outputs are added up in high precision, and their gradient is
    gathered in float8 where both matmuls that take it cast it alike, with one scale for the tensor.
    Arguments are those of `RowwiseParallel`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear("Float8RowwiseParallel", module)
        super()._apply(module, device_mesh)
        module.__class__ = _ParallelLinear
        assert isinstance(module, _ParallelLinear)
        module.output_layouts = self.output_layouts
        return module


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that gathers once, in float8, what several layers of a module take.

    In float8 where all of them cast it alike, with one scale for the tensor. Arguments are those of
    `PrepareModuleInput` and:

    Args:
        fwd_config_submodule_fqn: name of the layer in the module whose casts decide; by default all
            linear layers of the module must agree.
    """

    def __init__(self, *, fwd_config_submodule_fqn: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._cast: Spec | None = None

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if isinstance(input_layout, Shard) and isinstance(desired_layout, Replicate):
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
            whole = gathered(input, self._cast)
            return whole.to_local() if self.use_local_output else whole
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = self.fwd_config_submodule_fqn
        layers = [module.get_submodule(name)] if name is not None else list(module.modules())
        found = {casts_of(m.weight)[0] for m in layers if isinstance(m, nn.Linear)}
        self._cast = found.pop() if len(found) == 1 else None
        return super()._apply(module, device_mesh)
