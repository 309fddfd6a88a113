"""The places in a model that hold tensors: what is saved from them, and loaded into them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ao_core.errors import CheckpointError
from ao_core.tensor.described import describe

__all__ = ["Owner", "check_no_extra_state", "owners_of"]


@dataclass(frozen=True)
class Owner:
    """A module's parameter or buffer; a tied tensor has several."""

    #: the name in the model, such as "layers.0.weight"
    fqn: str
    module: nn.Module
    #: the name in `module`
    name: str
    tensor: Tensor
    #: whether it belongs into a checkpoint
    persistent: bool = True

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, and no buffer."""
        return self.name in self.module._parameters

    def put(self, tensor: Tensor) -> None:
        """Replace what the module holds there."""
        if isinstance(tensor, nn.Parameter):
            setattr(self.module, self.name, tensor)
            describe(self.module)
        else:
            self.module._buffers[self.name] = tensor


def owners_of(model: nn.Module) -> Iterator[Owner]:
    """All parameters and buffers in the order of `state_dict`, tied ones once for each name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Owner(dot + name, module, name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield Owner(dot + name, module, name, buffer, persistent)


def check_no_extra_state(model: nn.Module) -> None:
    """Raise `CheckpointError` if a module keeps state that is neither parameter nor buffer."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{name or 'the model'} ({type(module).__name__}) has extra state, which only a "
                "pickle could hold; keep it in a buffer, or save it apart"
            )
