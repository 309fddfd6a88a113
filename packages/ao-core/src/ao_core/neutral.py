"""A block in the state of a fresh process: what torch was told to do around it does not reach inside.

Plugins and built-in tables are loaded at the first lookup, wherever that happens: in a `torch.device`
context, below a `FakeTensorMode`, while a program is traced. What they compute then, and keep, must not
depend on that.
"""

from __future__ import annotations

import pickle
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

__all__ = ["Setting", "neutral", "restored", "settings"]


@contextmanager
def neutral() -> Iterator[None]:
    """Run a block without modes, devices, transforms or autocast, recording gradients, in float32.

    Of the calling thread: modes of `__torch_function__` and `__torch_dispatch__` (`torch.device`, fake and
    proxy tensors), transforms of `torch.func`, inference mode, `no_grad`, autocast, and the dispatch keys
    inside of a `__torch_dispatch__`. Of the process: the default dtype. All of it comes back afterwards.
    """
    keys = _fresh_keys()
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(_without_function_modes())
        if _dispatch_modes():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch._C._EnableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C._ForceDispatchKeyGuard(*keys))
        stack.callback(_set_dtype, dtype)
        _set_dtype(torch.float32)
        yield


def _set_dtype(dtype: torch.dtype) -> None:
    # the default of the whole process: left alone where it is right already
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)


def _dispatch_modes() -> int:
    """How many modes of `__torch_dispatch__` are active."""
    before: int = torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return before + torch._C._len_torch_dispatch_stack()


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Take the modes of `__torch_function__` off, the default device among them."""
    of_thread = torch._GLOBAL_DEVICE_CONTEXT
    device = getattr(of_thread, "device_context", None)
    modes = _popped()
    of_thread.device_context = None
    try:
        yield
    finally:
        _popped()  # what the block left behind
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
        of_thread.device_context = device


def _popped() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(count)]


def _keys() -> tuple[Any, Any]:
    """The dispatch keys that this thread includes and excludes."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@cache
def _fresh_keys() -> tuple[Any, Any]:
    """The dispatch keys that a new thread includes and excludes.

    Such a thread is started only where the calling one is not known to have them: from its first thread on
    a process pays for each of its locks, a twentieth of an eager matmul.
    """
    keys = _keys()
    if _are_fresh(*keys):
        return keys
    found: list[tuple[Any, Any]] = []
    thread = threading.Thread(target=lambda: found.append(_keys()))
    thread.start()
    thread.join()
    return found[0]


def _are_fresh(include: Any, exclude: Any) -> bool:
    """Whether nothing but autocast, which is off, is left out, and nothing is added."""
    excluded = re.findall(r"\w+", str(exclude))[1:]
    return (
        str(include) == "DispatchKeySet(BackendSelect, ADInplaceOrView)"
        and all(name.startswith("Autocast") for name in excluded)
        and not torch._C._is_any_autocast_enabled()
    )


# -- what code may change for everybody ------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Something that belongs to the process or thread, and not to a package that is imported."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    #: whether values say more than that they differ
    shown: bool = True


def _device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _deterministic() -> tuple[bool, bool]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _set_numpy_random(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


#: classes of warnings that are not a package's own
_COMMON = (Warning, UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)


def _broad_filters() -> list[Any]:
    """Filters for warnings of all packages; those for one message or module are a package's business."""
    return [f for f in warnings.filters if f[1] is None and f[3] is None and f[2] in _COMMON]


def _set_filters(broad: list[Any]) -> None:
    now = _broad_filters()
    if now != broad:
        warnings.filters[:] = [f for f in warnings.filters if f not in now] + broad  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


@cache
def settings() -> tuple[Setting, ...]:
    """What no import may change."""
    return (
        Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("torch's default device", _device, torch.set_default_device),
        Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        Setting("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
        Setting(
            "torch.use_deterministic_algorithms (on, warn only)",
            _deterministic,
            lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
        ),
        Setting(
            "torch's float32 matmul precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        Setting("torch's random numbers", _random, _set_random, shown=False),
        Setting("Python's random numbers", random.getstate, random.setstate, shown=False),
        Setting("NumPy's random numbers", _numpy_random, _set_numpy_random, shown=False),
        Setting("the filters of all warnings", _broad_filters, _set_filters, shown=False),
    )


def _random() -> bytes:
    return bytes(torch.get_rng_state().tolist())


def _set_random(state: bytes) -> None:
    torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))


@contextmanager
def restored(changes: list[str]) -> Iterator[None]:
    """Set back what the block changes of `settings`, and add a sentence part about each to `changes`."""
    before = [(setting, setting.get()) for setting in settings()]
    try:
        yield
    finally:
        for setting, value in before:
            now = setting.get()
            if value is None and setting.get is _numpy_random:
                continue  # imported meanwhile
            if pickle.dumps(now) != pickle.dumps(value):
                setting.set(value)
                how = f" from {value} to {now}" if setting.shown else ""
                changes.append(f"{setting.name}{how}")
