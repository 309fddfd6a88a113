"""Movement pruning (Sanh et al. 2020, arXiv 2005.07683): removes what training moves towards zero."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from ao_core import Config, FqnToConfig
from ao_core.ext import ConfigError, checked
from ao_core.ext.quantizing import Decision, FilterFn
from ao_sparsity.prune.choosing import chosen, matrix, pruning_by_score
from ao_sparsity.prune.patterns import NofM, Unstructured
from ao_sparsity.prune.result import Pruning

__all__ = ["Movement"]


class Movement:
    """Scores that add up −w · ∂L/∂w at each step of an optimizer: positive where weights grow away from zero.

    As a context it counts the steps within. A removed weight is zero, so its score stays what it was.
    """

    @checked
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, filter_fn: FilterFn | None = None
    ) -> None:
        """Start to count.

        Args:
            model: the model that is trained.
            optimizer: the one of its parameters, whose steps count.
            filter_fn: (module, its name) -> whether its weights are scored, in place of the default.

        Raises:
            QuantizationError: weights have NaN or inf, or are quantized.
        """
        self._model, self._filter_fn = model, filter_fn
        decisions = chosen(model, Unstructured(0.0), filter_fn)
        self._decisions = [entry for entry in decisions if entry.config is not None]
        #: name of a parameter -> its scores so far, float32; none before its first gradient
        self.scores: dict[str, Tensor] = {}
        self._handle = optimizer.register_step_pre_hook(self._add)

    @torch.no_grad()
    def _add(self, *_: object) -> None:
        for entry in self._decisions:
            weight = entry.tensor
            if weight.grad is not None:
                moved = weight.detach().float() * weight.grad.float()
                before = self.scores.get(entry.fqn)
                self.scores[entry.fqn] = -moved if before is None else before.sub_(moved)

    def prune(self, pattern: Config, *, scope: str = "layer") -> Pruning:
        """Masks that keep the weights with the greatest scores so far.

        Args:
            pattern: `Unstructured` or `NofM`, or a `FqnToConfig` of those.
            scope: as for `prune_magnitude`.

        Raises:
            ConfigError: another pattern: the norm of scores that have signs means nothing.
        """
        entries = pattern.entries if isinstance(pattern, FqnToConfig) else (("*", pattern),)
        for key, each in entries:
            if each is not None and not isinstance(each, (Unstructured, NofM)):
                raise ConfigError(
                    f"pattern[{key!r}]={each}: movement scores have signs, which norms of larger units "
                    "forget; use Unstructured or NofM"
                )

        def score(entry: Decision) -> Tensor | str:
            found = self.scores.get(entry.fqn)
            if found is None:
                return "no step of the optimizer had a gradient for it"
            return matrix(entry, found)

        decisions = chosen(self._model, pattern, self._filter_fn)
        return pruning_by_score("movement", decisions, score, scope, None)

    def close(self) -> None:
        """Stop counting."""
        self._handle.remove()

    def __enter__(self) -> Movement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
