"""`WrappedOptimizer`: an optimizer that lets another optimizer step stand-ins of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ao_optim.checkpoints import check_form

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(Optimizer):
    """Base of `CPUOffloadOptimizer` and `GaLore`.

    Schedulers and users change the options of this optimizer's groups. The inner optimizer has groups of
    stand-ins, and gets the current options at each step. Its state is this optimizer's state.

    Args:
        params: parameters, or groups of them.
        optimizer: class of the inner optimizer.
        own: options of this class that groups may set, which the inner optimizer does not know.
        options: of the inner optimizer.
    """

    inner: Optimizer
    #: names of what this class itself keeps for a parameter
    extra_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, params: Any, optimizer: type[Optimizer], own: dict[str, Any], **options: Any
    ) -> None:
        self._own = own
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        #: what this class itself keeps: `extra_names` and their values
        self._extras: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        # one parameter, so that the inner optimizer names its defaults; it is taken out again
        self.inner = optimizer([torch.zeros(1, 1)], **options)
        self.inner.param_groups.clear()
        super().__init__(params, {**self.inner.defaults, **own})

    def stand_in(self, param: Tensor, group: dict[str, Any]) -> nn.Parameter:
        """The parameter of the inner optimizer that stands in for a parameter of this one."""
        raise NotImplementedError

    def before(self, param: Tensor, group: dict[str, Any]) -> None:
        """Give the stand-in its gradient, for a parameter that has one."""
        raise NotImplementedError

    def after(self, param: Tensor, group: dict[str, Any]) -> None:
        """Copy the inner step's change from the stand-in to the parameter."""
        raise NotImplementedError

    def check_extras(
        self, param: Tensor, group: dict[str, Any], extras: dict[str, Any], key: Any
    ) -> None:
        """Raise `ValueError` where what a state dict has of `extra_names` is not for this parameter."""

    def wait(self) -> None:
        """Called between `before` of all parameters and the inner step, and when all is done."""

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("inner", "_own", "_stand_ins", "_extras")}
        return {**super().__getstate__(), **own}

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, here and to the inner optimizer; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            made = {param: self.stand_in(param, group) for param in group["params"]}
            self.inner.add_param_group(
                {**self._inner_options(group), "params": list(made.values())}
            )
        except BaseException:
            self.param_groups.pop()
            raise
        self._stand_ins.update(made)

    def _inner_options(self, group: dict[str, Any]) -> dict[str, Any]:
        own = {"params", "param_names", *self._own}
        return {name: value for name, value in group.items() if name not in own}

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what the closure returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = []
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(self._inner_options(group))
            for param in group["params"]:
                self._stand_ins[param].grad = None
                if param.grad is not None:
                    self.before(param, group)
                    moving.append((param, group))
        self.wait()
        skipped = getattr(self.inner, "skipped_steps", 0)
        self.inner.step()
        if getattr(self.inner, "skipped_steps", 0) == skipped:
            for param, group in moving:
                self.after(param, group)
        self.wait()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if "skipped_steps" in inner:
                group["skipped_steps"] = inner["skipped_steps"]
        self._share_state()
        return loss

    def _share_state(self) -> None:
        """Show the inner optimizer's state, and what this one keeps, as that of the parameters."""
        for param, stand_in in self._stand_ins.items():
            if stand_in in self.inner.state:
                self.state[param] = {**self.inner.state[stand_in], **self._extras[param]}

    # -- checkpoints -----------------------------------------------------------------------------

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state dict of the inner optimizer's class."""
        check_form(state_dict)
        saved = state_dict["param_groups"]
        keys = [key for group in saved for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        inner_state, extras = {}, {}
        for key, state in state_dict["state"].items():
            inner_state[key] = {n: v for n, v in state.items() if n not in self.extra_names}
            extras[key] = {n: v for n, v in state.items() if n in self.extra_names}
        for group, old in zip(self.param_groups, saved, strict=False):
            for key, param in zip(old["params"], group["params"], strict=False):
                own = {name: old.get(name, group[name]) for name in self._own}
                self.check_extras(param, {**group, **own}, extras.get(key, {}), key)
        groups = [{**self._inner_options(group), "params": group["params"]} for group in saved]
        self.inner.load_state_dict({"state": inner_state, "param_groups": groups})
        whole = [
            {**{name: group[name] for name in self._own}, **inner, **old}
            for group, inner, old in zip(
                self.param_groups, self.inner.state_dict()["param_groups"], saved, strict=True
            )
        ]
        super().load_state_dict({"state": {}, "param_groups": whole})
        for key, param in zip(keys, params, strict=True):
            self._extras[param] = {
                name: value.to(param.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in extras.get(key, {}).items()
            }
        self._share_state()
