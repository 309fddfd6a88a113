"""`CPUOffloadOptimizer`: parameters on a device, their optimizer and its state in the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ao_core.ext import checked
from ao_optim.optimizers import AdamW8bit
from ao_optim.wrapped import WrappedOptimizer

__all__ = ["CPUOffloadOptimizer"]


class CPUOffloadOptimizer(WrappedOptimizer):
    """Any optimizer, run by the CPU on copies of the parameters in pinned memory.

    A gradient is on its way to the host as soon as backward has it. One that is changed afterwards, by
    clipping, unscaling or accumulation, is sent again at the step, so the step always takes what
    `grad` holds. Parameters that something else changed, such as `load_state_dict`, are fetched anew.
    Parameters on the CPU work alike, without streams.

    Args:
        params: parameters, or groups of them.
        optimizer: class of the inner optimizer.
        options: of the inner optimizer.
    """

    @checked
    def __init__(self, params: Any, optimizer: type[Optimizer] = AdamW8bit, **options: Any) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[Tensor, Tensor] = {}
        #: gradients as they were sent, with the version that they had
        self._sent: dict[Tensor, tuple[Tensor, int]] = {}
        self._versions: dict[Tensor, int] = {}
        super().__init__(params, optimizer, {}, **options)

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {
            name: {} for name in ("_streams", "_buffers", "_sent", "_versions")
        }
        return {**super().__getstate__(), **empty}

    def stand_in(self, param: Tensor, group: dict[str, Any]) -> nn.Parameter:
        """A copy in pinned memory."""
        host = nn.Parameter(_pinned(param))
        host.detach().copy_(param.detach())
        self._versions[param] = param._version
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._send)
        return host

    def _send(self, param: Tensor) -> None:
        """Start copying a gradient to the host."""
        grad = param.grad
        assert grad is not None
        if param not in self._buffers:
            self._buffers[param] = _pinned(param)
        with torch.no_grad(), self._beside(param.device):
            self._buffers[param].copy_(grad, non_blocking=True)
            if grad.is_cuda:
                grad.record_stream(self._streams[param.device])
        self._sent[param] = grad, grad._version

    def before(self, param: Tensor, group: dict[str, Any]) -> None:
        """The gradient as it is now, and the parameter if it is not what the last step left."""
        sent, grad = self._sent.pop(param, None), param.grad
        assert grad is not None
        if sent is None or sent[0] is not grad or sent[1] != grad._version:
            self._send(param)
            del self._sent[param]
        host = self._stand_ins[param]
        host.grad = self._buffers[param]
        if self._versions.get(param) != param._version:
            with self._beside(param.device):
                host.copy_(param, non_blocking=True)

    def after(self, param: Tensor, group: dict[str, Any]) -> None:
        """Copy the parameter back."""
        with self._beside(param.device):
            param.copy_(self._stand_ins[param], non_blocking=True)
        self._versions[param] = param._version

    def wait(self) -> None:
        """Before the inner step the host waits for gradients; after it, each device for parameters."""
        for device, stream in self._streams.items():
            stream.synchronize()
            torch.cuda.current_stream(device).wait_stream(stream)

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A stream for copies, which sees what was done on the device so far."""
        if device.type != "cuda":
            return nullcontext()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)


def _pinned(param: Tensor) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda)
