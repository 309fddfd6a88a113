"""The optimizers by their names: a rule, and the format that its state has by default."""

from __future__ import annotations

from ao_optim import rules
from ao_optim.optimizer import LowBitOptimizer

__all__ = [
    "AdEMAMix8bit",
    "Adagrad8bit",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "LAMB8bit",
    "Lion8bit",
    "Muon8bit",
    "RMSprop8bit",
    "SGD8bit",
]


class AdamW8bit(LowBitOptimizer):
    """AdamW with 2.03 bytes of state per parameter; loads the state of bitsandbytes' 8-bit AdamW."""

    rule = rules.ADAMW


class AdamW4bit(LowBitOptimizer):
    """AdamW with 1.03 bytes of state per parameter: second moments of matrices have rank-1 scales."""

    rule = rules.ADAMW
    format = "rank1_4bit"


class AdamWFp8(LowBitOptimizer):
    """AdamW with moments in float8: e4m3, and for squares 8 bits without a sign."""

    rule = rules.ADAMW
    format = "float8"


class Adam8bit(LowBitOptimizer):
    """Adam with 2.03 bytes of state per parameter; weight decay is part of the gradient."""

    rule = rules.ADAM


class Adam4bit(LowBitOptimizer):
    """Adam with 1.03 bytes of state per parameter; weight decay is part of the gradient."""

    rule = rules.ADAM
    format = "rank1_4bit"


class AdamFp8(LowBitOptimizer):
    """Adam with moments in float8, as `AdamWFp8`; weight decay is part of the gradient."""

    rule = rules.ADAM
    format = "float8"


class SGD8bit(LowBitOptimizer):
    """Stochastic gradient descent with its momentum in 8 bits; the default momentum is 0.9."""

    rule = rules.SGD


class Lion8bit(LowBitOptimizer):
    """Lion with its momentum in 8 bits."""

    rule = rules.LION


class AdEMAMix8bit(LowBitOptimizer):
    """AdEMAMix with its three averages in 8 bits."""

    rule = rules.ADEMAMIX


class RMSprop8bit(LowBitOptimizer):
    """RMSprop with averages in 8 bits."""

    rule = rules.RMSPROP


class Adagrad8bit(LowBitOptimizer):
    """Adagrad with its sums of squares in 8 bits."""

    rule = rules.ADAGRAD


class LAMB8bit(LowBitOptimizer):
    """LAMB with both moments in 8 bits."""

    rule = rules.LAMB


class Muon8bit(LowBitOptimizer):
    """Muon with its momentum in 8 bits, for matrices only; give other parameters to AdamW8bit."""

    rule = rules.MUON
