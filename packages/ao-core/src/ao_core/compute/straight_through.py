"""The matmuls of training for a format: rounded values forward, gradients as if nothing were rounded."""

from __future__ import annotations

from dataclasses import replace

from ao_core.compute.matmuls import Matmuls
from ao_core.errors import ConfigError
from ao_core.spec import Spec, matrix_block

__all__ = ["straight_through"]


def straight_through(weight: Spec, act: Spec | None = None) -> Matmuls:
    """How a `ComputeWeight` casts its matmuls so that its layer learns to be quantized.

    The output is that of quantized weights (and activations). Both gradients are the matmuls of
    gradients in high precision with the same rounded values: what autograd gives where the derivative
    of rounding is taken to be 1 (the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432).

    Args:
        weight: format of the weight (N, K), in blocks of at most two dimensions.
        act: format of activations (M, K); None: as they are.
    """
    grad_weight = None if act is None else _transposed(act)
    return Matmuls(replace(weight, act=act), _transposed(weight), grad_weight)


def _transposed(spec: Spec) -> Spec:
    """The same blocks of the transposed matrix."""
    if len(spec.block) > 2:
        raise ConfigError(f"block={spec.block}: the blocks of a matrix have at most two dimensions")
    return replace(spec, block=matrix_block(spec.block)[::-1], act=None)
