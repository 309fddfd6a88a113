"""Linear layers that learn to be 2:4 sparse, in their weights or in their input."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.ext import ConfigError, checked, is_converted
from ao_core.ext.kernels import autocasted, is_sharded
from ao_sparsity.masks import n_of_m_mask
from ao_sparsity.train import kernels
from ao_sparsity.train.known import Known, known_mask

__all__ = ["SemiSparseActivationLinear", "SemiSparseLinear", "SparseLinear"]

_Self = TypeVar("_Self", bound="SparseLinear")


class SparseLinear(nn.Linear):
    """What the layers of sparse training share: an `nn.Linear` becomes one in place, and back.

    The module stays the same object, with its parameters, hooks and name; only its class changes.
    So optimizers, their state and checkpoints go on as they are.
    """

    #: what `quantize_` says where a recipe of training in low precision meets such a layer
    own_matmuls: ClassVar[str] = (
        "the layer is one of sparse training, which computes its matmuls itself: they would not be in low "
        "precision; swap it back first with swap_semi_sparse_linear_with_linear"
    )

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if in_features < 0 or out_features < 0:
            raise ConfigError(f"{in_features=}, {out_features=}: sizes are not negative")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.setup(**options)

    @classmethod
    def from_dense(cls: type[_Self], linear: nn.Linear, **options: Any) -> _Self:
        """Make `linear` a layer of this class, in place; one that is gets the options anew.

        Raises:
            ConfigError: it is not a plain `nn.Linear`, or an option has a value that cannot work.
        """
        cls.check(linear, **options)
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.setup(**options)
        return linear

    @classmethod
    def check(cls, module: nn.Module, **options: Any) -> None:
        """Raise `ConfigError` where a module cannot become one of this class with these options."""
        found = type(module)
        if found is not cls and issubclass(found, SparseLinear):
            raise ConfigError(f"it is a {found.__name__} already; swap it back first")
        if found not in (cls, nn.Linear):
            raise ConfigError(
                f"a {found.__name__} is not a plain nn.Linear: what it computes beside would be lost"
            )
        assert isinstance(module, nn.Linear)
        if is_converted(module.weight):
            raise ConfigError(
                f"its weight is a {type(module.weight).__name__}; sparse training needs a dense one"
            )
        if is_sharded(module.weight):
            raise ConfigError("its weight is sharded already; swap layers before fully_shard")
        trial: Any = nn.Linear(module.in_features, module.out_features, device="meta")
        trial.__class__ = cls
        try:
            trial.setup(**options)
        except TypeError as error:
            raise ConfigError(str(error)) from error

    def check_dense(self) -> None:
        """Raise `ConfigError` where something else changed the module's class too, as `fully_shard` does."""
        wrappers = [c for c in type(self).__mro__[:-1] if not issubclass(c, nn.Module)]
        if wrappers:
            raise ConfigError(f"it was made a {wrappers[0].__name__} too, which would be undone")

    def to_dense(self) -> nn.Linear:
        """Make it an `nn.Linear` again, in place, with all its weights, masked or not.

        Raises:
            ConfigError: something else changed the class of the module too, as `fully_shard` does.
        """
        self.check_dense()
        self.teardown()
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def setup(self) -> None:
        """Take the options of the class; again where they change."""

    def teardown(self) -> None:
        """Remove what `setup` added."""

    def effective_weight(self) -> Tensor:
        """The weight (out, in) that takes part in the matmul, zeros and all."""
        return self.weight


class SemiSparseLinear(SparseLinear):
    """Multiplies with the 2:4 sparse part of its weight, forward and backward.

    Of every 4 × 4 tile of the weight the best eight stay, two in each row and each column, chosen anew
    whenever the weight has changed (`tile_mask`). So the weight is 2:4 sparse as it is and transposed, and
    output and gradient of the input are both sparse matmuls (Hubara et al. 2021, arXiv:2102.08124). The
    gradient of the weight is dense and straight-through: weights that are zero now may come back.

    The option `decay` is what SR-STE adds to the gradient in every backward pass: so many times each weight
    that is not kept (Zhou et al. 2021, arXiv:2102.04010, who take 2e-4).

    Args:
        in_features: as of `nn.Linear`; of any size.
        out_features: the same.
        bias: the same.
        device: the same.
        dtype: the same.

    Raises:
        ConfigError: a negative `decay`.
    """

    decay: float
    #: the mask of the last call, on a processor
    _known: Known | None = None

    def setup(self, decay: float = 0.0) -> None:
        """Take the options.

        Raises:
            ConfigError: `decay` is negative.
        """
        if not decay >= 0:
            raise ConfigError(f"decay={decay}: weights that are not kept decay by 0 or more")
        self.decay = decay

    def teardown(self) -> None:
        """Forget the options."""
        del self.decay
        self.__dict__.pop("_known", None)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles look for masks of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def _mask(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        known = known_mask(weight, self._known)
        if known is None:
            found: Tensor = kernels.tile_mask(weight)
            return found
        self._known = known
        return known.mask

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        # of the weight as it is stored, as `squash_masks` finds it: in 16 bits other sums are equal
        mask = self._mask(self.weight)
        input, weight, bias = autocasted(input, self.weight, self.bias)
        rows = input.reshape(prod(input.shape[:-1]), self.in_features)
        out: Tensor = kernels.straight_through_mm(rows, weight, mask, self.decay)
        out = out.reshape(*input.shape[:-1], self.out_features)
        return out if bias is None else out + bias

    def effective_weight(self) -> Tensor:
        """What is kept of the weight."""
        return torch.where(self._mask(self.weight), self.weight, 0)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, decay={self.decay}"


class SemiSparseActivationLinear(SparseLinear):
    """Multiplies with the two of the greatest magnitude of every four of its input.

    For inputs that are mostly zero anyway, as after a squared ReLU (Haziza et al. 2025,
    arXiv:2503.16672). The weight is dense. Gradients are those of the function that is computed: what was
    dropped from the input has none, and the weight's is made of what was kept.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        mask = n_of_m_mask(input.detach().abs(), 2, 4)
        return F.linear(torch.where(mask, input, 0), self.weight, self.bias)
