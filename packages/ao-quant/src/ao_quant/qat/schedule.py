"""The schedule of BitNet b1.58: two stages of learning rates, weight decay in the first alone."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ao_core.ext import ConfigError

__all__ = ["TwoStageLR", "two_stages"]

#: of the learning rate, where the first stage ends and where the second begins: 8e-4 and 5e-4 of 1.5e-3
_FIRST_END, _SECOND_START = 8 / 15, 1 / 3


def two_stages(step: int, steps: int, warmup: int = 0, switch: float = 0.5) -> float:
    """The share of the learning rate at a step, as `TwoStageLR` has it."""
    turn = switch * steps
    if step < warmup:
        return (step + 1) / warmup
    if step < turn:
        return 1 - (1 - _FIRST_END) * (step - warmup) / max(turn - warmup, 1)
    return _SECOND_START * max(1 - (step - turn) / max(steps - turn, 1), 0)


class TwoStageLR(LambdaLR):
    """Learning rates and weight decay that train ternary weights better than a cosine.

    The learning rate falls linearly to 8/15 of what the optimizer has; then it drops to a third, and falls
    linearly to 0. In this second stage there is no weight decay, which would pull weights over the borders
    between -1, 0 and 1 until the end. The two stages, and 1.5e-3 to 8e-4 and 5e-4 to 0, are those of BitNet
    b1.58 2B4T (Ma et al. 2025, arXiv:2504.12285).

    Args:
        optimizer: with the learning rates and the weight decay of the beginning.
        steps: of the whole training.
        warmup: steps in which the learning rate rises to its full value.
        switch: the share of the steps after which the second stage begins, from 0 to 1.
        last_epoch: as of every scheduler of torch.

    Raises:
        ConfigError: steps, warmup or switch that leave no stage.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: int,
        warmup: int = 0,
        switch: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        if steps < 1 or not 0 <= switch <= 1:
            raise ConfigError(f"steps={steps}, switch={switch}: use at least one step, and 0 to 1")
        if not 0 <= warmup <= switch * steps:
            raise ConfigError(
                f"warmup={warmup}: use at most {switch * steps:g} steps, where the second stage begins"
            )
        #: step after which there is no weight decay
        self.turn = switch * steps
        self.decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        super().__init__(
            optimizer,
            partial(two_stages, steps=steps, warmup=warmup, switch=switch),
            last_epoch,
        )

    def step(self, epoch: int | None = None) -> None:
        """To be called after each step of the optimizer."""
        super().step(epoch)
        for group, decay in zip(self.optimizer.param_groups, self.decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay if self.last_epoch < self.turn else 0.0
