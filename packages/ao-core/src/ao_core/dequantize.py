"""`dequantize_`: a dense model again."""

from __future__ import annotations

from torch import nn

from ao_core.arguments import checked
from ao_core.outcome import tell
from ao_core.tensor import QTensor
from ao_core.tensor.described import undescribe
from ao_core.tensor.saving.lock import forget

__all__ = ["dequantize_"]


@checked
def dequantize_(model: nn.Module) -> list[str]:
    """Replace every quantized parameter by a dense one, in place; returns their names. Ties are kept."""
    done: dict[int, nn.Parameter] = {}
    names = []
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if isinstance(parameter, QTensor):
                if id(parameter) not in done:
                    done[id(parameter)] = nn.Parameter(parameter.dequantize(), requires_grad=False)
                setattr(module, name, done[id(parameter)])
                names.append(f"{module_fqn}.{name}" if module_fqn else name)
                undescribe(module)
    forget(model)
    if names:
        tell(model)
    return names
