"""Back from `ComputeWeight`s to ordinary parameters, when training is over."""

from __future__ import annotations

from torch import Tensor, nn

from ao_core.arguments import checked
from ao_core.compute.extras import extra_tensors
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import ConfigError
from ao_core.tensor.described import undescribe
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.saving.owners import owners_of
from ao_core.tensor.sharding import is_sharded, local_shard

__all__ = ["unwrap_"]


@checked
def unwrap_(model: nn.Module) -> list[str]:
    """Replace every `ComputeWeight` by an ordinary parameter with its values, in place.

    The new parameters share the memory of the old ones; ties are kept. Optimizers hold the old ones, so make
    them anew for further training.

    Returns:
        The names of the parameters.

    Raises:
        ConfigError: a weight is sharded, or trains further tensors (a learned scale, an adapter), whose layer
            computes with them. The model is as it was then.
    """
    found = [o for o in owners_of(model) if isinstance(local_shard(o.tensor), ComputeWeight)]
    for owner in found:
        weight = local_shard(owner.tensor)
        if is_sharded(owner.tensor) or isinstance(weight.memory, QTensor):
            raise ConfigError(
                f"{owner.fqn} is sharded; save its state dict, which is dense, or put its matmuls back to "
                "high precision with float8_fallback of ao_float8"
            )
        if extras := extra_tensors(owner.module):
            raise ConfigError(
                f"{owner.fqn} computes with further tensors ({', '.join(extras)}); convert the layer as its "
                "package says"
            )
    made: dict[int, Tensor] = {}
    for owner in found:
        weight = local_shard(owner.tensor)
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(weight.memory.detach(), weight.requires_grad)
        setattr(owner.module, owner.name, made[id(weight)])
        undescribe(owner.module)
    return [owner.fqn for owner in found]
