"""`LowBitOptimizer`: a `torch.optim.Optimizer` made of an update rule and a format for its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ao_core import QTensor, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import local_shard
from ao_core.ext.quantizing import warn_caller
from ao_optim import checkpoints
from ao_optim.apply import apply
from ao_optim.formats import empty_state, format_named
from ao_optim.options import check_types
from ao_optim.quantized import check_trainable
from ao_optim.rules import Rule
from ao_optim.shards import everywhere

__all__ = ["COMMON", "LostUpdatesWarning", "LowBitOptimizer"]

#: options of every rule with their defaults
COMMON: dict[str, Any] = {
    "maximize": False,
    "capturable": False,
    "min_quantized_numel": 4096,
    "rounding": None,
    "seed": 0,
    "skip_nonfinite": False,
}
#: how a parameter in 16 bits takes an update that it cannot hold
ROUNDINGS = ("nearest", "stochastic", "kahan")
#: that of small parameters in 16 bits, whose state in float32 would be twice that of torch
SMALL = "companded8"


class LostUpdatesWarning(UserWarning):
    """Updates of parameters in 16 bits that are less than half a step of theirs are lost."""


#: options of torch's optimizers that say how to compute, and values that change nothing here
IGNORED: dict[str, tuple[bool | None, ...]] = {
    "fused": (None, False, True),
    "foreach": (None, False, True),
    "differentiable": (None, False),
    "amsgrad": (None, False),
}


#: dtypes of parameters whose small updates are lost
_HALVES = (torch.bfloat16, torch.float16)


def _warn_of_nearest(params: list[Tensor]) -> None:
    """Say that small updates of these parameters are lost, where nobody has said that they may be."""
    lossy = [
        param.dtype
        for param in params
        if param.requires_grad
        and param.dtype in _HALVES
        and not isinstance(local_shard(param), QTensor)
    ]
    if lossy:
        dtype = str(lossy[0]).removeprefix("torch.")
        better = "'kahan'" if lossy[0] == torch.float16 else "'stochastic' or 'kahan'"
        warn_caller(
            f"parameters in {dtype} are rounded to nearest, so updates of less than half their step "
            f"are lost: give rounding={better}, or 'nearest' to keep it so",
            LostUpdatesWarning,
        )


def _storage(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group[name] for name in checkpoints.STORAGE)


class LowBitOptimizer(Optimizer):
    """An update rule whose moments are quantized tensors.

    A subclass names a rule and the format that its state has by default. Everything is an option of a
    parameter group, so groups may differ in it. State is made when a parameter first has a gradient.

    Beside those of its rule, every optimizer has these options:

    - `state_format`: "companded8", "dynamic8", "float8", "rank1_4bit", "bfloat16" or
      "float32".
    - `min_quantized_numel`: parameters with fewer elements keep their state in float32, or where they
      are in 16 bits in "companded8".
    - `rounding`: how parameters in bfloat16 or float16 are updated: "nearest"; "stochastic" (bfloat16
      only), up or down with the probability that keeps the mean; or "kahan", which keeps what
      rounding took in state of the parameter's dtype. None is "nearest", with a warning where
      there are such parameters.
    - `seed`: of stochastic rounding: an integer, or a `torch.Generator` that draws one. The step is
      mixed in, and no other generator is touched.
    - `maximize`: go up the gradient.
    - `capturable`: keep the count of steps, and a tensor `lr`, on the device, for CUDA graphs; the
      kernels that serve take numbers, so torch's own operations compute.
    - `skip_nonfinite`: look at all gradients, and leave out a step where one is NaN or infinite,
      counting it in `skipped_steps`. Else such values spread as in any optimizer, and in
      quantized state to the block of elements that share their scale.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: learning rate, a number or a tensor.
        options: by name. `fused` and `foreach` of torch's optimizers are taken and change nothing.

    Raises:
        ValueError: an option cannot be, or a parameter cannot be optimized.
        TypeError: there is no such option.

    Warns:
        LostUpdatesWarning: parameters are in 16 bits, and `rounding` is not given.
    """

    rule: ClassVar[Rule]
    #: of its state, unless the option `state_format` says otherwise
    format: ClassVar[str] = "companded8"
    #: all options with their defaults
    known: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.known = {**cls.rule.defaults, "state_format": cls.format, **COMMON}
        own = [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD if name == "lr" else Parameter.KEYWORD_ONLY,
                default=default,
            )
            for name, default in cls.known.items()
        ]
        cls.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD), *own]
        )

    def __init__(self, params: Any, lr: float | Tensor | None = None, **options: Any) -> None:
        options = {n: v for n, v in options.items() if n not in IGNORED or v not in IGNORED[n]}
        if unknown := sorted(set(options) - set(self.known)):
            raise TypeError(
                f"{type(self).__name__} has no option {', '.join(unknown)}; it has "
                f"{', '.join(self.known)}"
            )
        if lr is not None:
            options["lr"] = lr
        #: how the state of each group is stored
        self._stored: list[tuple[Any, ...]] = []
        super().__init__(params, {**self.known, **options})

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own options; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        registry.load_plugins()  # here, so that no step waits for it
        self._stored.append(_storage(self.param_groups[-1]))
        if self.param_groups[-1]["rounding"] is None:
            _warn_of_nearest(self.param_groups[-1]["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stored = [_storage(group) for group in self.param_groups]

    def check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError where an option of a group cannot be."""
        check_types(group, self.known)
        self.rule.check(group)

    def _check(self, group: dict[str, Any]) -> None:
        self.check_options(group)
        format_named(group["state_format"])
        if group["rounding"] not in (None, *ROUNDINGS):
            raise ValueError(
                f"Invalid rounding: {group['rounding']!r}; use one of {', '.join(ROUNDINGS)}"
            )
        if group["capturable"] and group["rounding"] == "stochastic":
            raise ValueError(
                "rounding='stochastic' draws new numbers at each step, which no graph can"
            )
        if isinstance(group["seed"], torch.Generator):
            # once, so that groups and checkpoints hold a number
            generator = group["seed"]
            drawn = torch.randint(1 << 62, (), generator=generator, device=generator.device)
            group["seed"] = int(drawn)
            if self.defaults["seed"] is generator:
                self.defaults["seed"] = group["seed"]
        for param in group["params"]:
            self._check_param(param, group)

    def _check_param(self, param: Tensor, group: dict[str, Any]) -> None:
        name = type(self).__name__
        if not param.is_floating_point():
            raise ValueError(
                f"{name} optimizes real floating-point parameters, not {param.dtype}; "
                "give complex ones as torch.view_as_real to an optimizer of their own"
            )
        if self.rule.only_matrices and param.dim() != 2:
            found = self._name_of(param, group)
            raise ValueError(
                f"{name} only supports 2D parameters whereas we found a parameter with size: "
                f"{param.size()}{found}. Give it the matrices, [p for p in model.parameters() if "
                "p.dim() == 2], and the others to AdamW8bit"
            )
        held = local_shard(param)
        if isinstance(held, QTensor) and param.requires_grad:
            check_trainable(held, group["rounding"])
        if group["rounding"] == "stochastic" and param.dtype == torch.float16:
            raise ValueError(
                "rounding='stochastic' is defined for bfloat16; use 'kahan' for float16"
            )

    @staticmethod
    def _name_of(param: Tensor, group: dict[str, Any]) -> str:
        """The name of a parameter in brackets, where names were given."""
        for each, name in zip(group["params"], group.get("param_names", ()), strict=False):
            if each is param:
                return f" ({name})"
        return ""

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out for a gradient that was not finite."""
        return int(self.param_groups[0].get("skipped_steps", 0))

    # -- stepping --------------------------------------------------------------------------------

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._finite():
            for group in self.param_groups:
                group["skipped_steps"] = group.get("skipped_steps", 0) + 1
            return loss
        steps = []
        for number, group in enumerate(self.param_groups):
            if self._stored[number] != _storage(group):
                self._store_anew(number, group)
            params = [p for p in group["params"] if p.grad is not None]
            states = self._states(params, group)
            self._check_shapes(params, states, group)
            steps.append((params, states, group))
        for number, (params, states, group) in enumerate(steps):
            apply(self.rule, params, states, group, number)
        return loss

    def _store_anew(self, number: int, group: dict[str, Any]) -> None:
        """Bring the state of a group into the formats that its options ask for now."""
        self._check(group)
        held = {param: self.state[param] for param in group["params"] if self.state.get(param)}
        self.state.update(checkpoints.stored_anew(self, held, group))
        self._stored[number] = _storage(group)

    def _finite(self) -> bool:
        """Whether no gradient forbids the step, of the groups that ask; all ranks have one answer."""
        watched = [
            p.grad
            for group in self.param_groups
            if group["skip_nonfinite"]
            for p in group["params"]
            if p.grad is not None
        ]
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for grad in map(local_shard, watched):
            if grad.numel():
                by_device[grad.device].append(grad)
        finite = all(
            bool(torch.isfinite(torch.stack(torch._foreach_norm(each, float("inf")))).all())
            for each in by_device.values()
        )
        return everywhere(finite, watched)

    def _states(self, params: list[Tensor], group: dict[str, Any]) -> list[dict[str, Tensor]]:
        """The state of parameters that have gradients, made where there is none yet."""
        if any(param.grad.is_sparse for param in params):  # type: ignore[union-attr]
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state.update(self.initial_state(param, group))
        return states

    def _check_shapes(
        self, params: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]
    ) -> None:
        """Raise where a state is not that of its parameter, before anything changes."""
        slots = [slot.name for slot in self.rule.slots(group)]
        with torch._C.DisableTorchFunctionSubclass():  # which makes asking a tensor fast
            for number, (param, state) in enumerate(zip(params, states, strict=True)):
                shape = local_shard(param).shape
                for name in slots:
                    if state[name].shape != shape:
                        raise ValueError(
                            f"{name} of parameter {number} has shape {tuple(state[name].shape)}, but the "
                            f"parameter has {tuple(shape)}: its size was changed after the state was made; "
                            f"make a new {type(self).__name__}, or load a state that fits"
                        )

    def initial_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        part = local_shard(param)
        device = part.device if group["capturable"] else torch.device("cpu")
        state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        for slot in self.rule.slots(group):
            state[slot.name] = empty_state(part, self.spec_of(part, group, slot.signed))
        if group["rounding"] == "kahan" and part.dtype != torch.float32:
            state["compensation"] = torch.zeros_like(part)
        return state

    def spec_of(self, part: Tensor, group: dict[str, Any], signed: bool) -> Any:
        """The format of a moment of (this rank's part of) a parameter: a spec, or a dtype; None: float32."""
        if not part.numel() or not part.dim():
            return None
        chosen = format_named(group["state_format"])
        if isinstance(chosen.signed, Spec) and part.numel() < group["min_quantized_numel"]:
            if part.dtype not in _HALVES:
                return None
            chosen = format_named(SMALL)
        return chosen.spec(signed, tuple(part.shape))

    # -- checkpoints -----------------------------------------------------------------------------

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer`; moments of a `DTensor` are `DTensor`s in float32.

        Quantized moments are kept as they are. Those of shards are dequantized, since blocks end with
        the shard: so a checkpoint of `torch.distributed.checkpoint` loads on any number of ranks.
        """
        return checkpoints.packed(super().state_dict(), self.param_groups)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the state of the same optimizer of torch or bitsandbytes.

        How state is stored (`state_format`, `min_quantized_numel`, `rounding`, `capturable`) stays as it
        is here; all other options are those of the dict. Moments are brought into this optimizer's
        format, on the device of their parameter. Nothing is changed if something does not fit.

        Raises:
            ValueError: another number of parameters, a moment of another shape, or the state of
                another optimizer.
        """
        checkpoints.check_form(state_dict)
        # hooks of the user see the dict as it was given, and the state as it will be
        before = self.register_load_state_dict_pre_hook(checkpoints.prepare)
        after = self.register_load_state_dict_post_hook(checkpoints.adopt, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def to_full_state(self) -> dict[str, Any]:
        """`state_dict` with all moments in float32: what the same optimizer of torch can load."""
        return checkpoints.full_state(self.state_dict())
