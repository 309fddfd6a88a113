"""DoRA and QA-LoRA as variants of `QuantizedLoraLinear`; PEFT's own where the weight is dense."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant, QALoraLinearVariant
from torch import Tensor, nn

from ao_core import QTensor
from ao_hf.peft.weights import row_squares, without_activations

if TYPE_CHECKING:
    from ao_hf.peft.layer import QuantizedLoraLinear

__all__ = ["QALora", "QuantizedDora", "QuantizedDoraLayer"]


class QuantizedDoraLayer(DoraLinearLayer):
    """The magnitudes of DoRA, with the norms of ‖W + sBA‖ by row from one matmul with the quantized W.

    ‖W + sBA‖² = ‖W‖² + 2s Σ (WAᵀ ∘ B) + s² Σ (B(AAᵀ) ∘ B), summed over each row. ‖W‖² is kept; it is
    measured again when the weight is another tensor or was written in place. Compiled code takes it
    as it is by then. Rows of zeros keep the output 0 that they have.
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__(fan_in_fan_out=False)
        self._squares = torch.empty(0)
        #: of a weight whose matmuls quantize activations, the one that does not, around the same memory
        self._exact: Tensor | None = None
        #: the weight that these two are of, its version and its device
        self._measured: tuple[weakref.ref[Tensor], int, torch.device] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_measured": None,
            "_exact": None,
        }  # weak references cannot be pickled

    def _measure(self, weight: Tensor) -> None:
        """Keep what is needed of a weight, unless it is kept already."""
        known = self._measured
        if (
            known is not None
            and known[0]() is weight
            and known[1:] == (weight._version, weight.device)
        ):
            return
        self._squares = row_squares(weight)
        exact = without_activations(weight)
        self._exact = None if exact is weight else exact
        self._measured = weakref.ref(weight), weight._version, weight.device

    def norms(self, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """‖W + sBA‖ of each row, (N,), float32, without a gradient."""
        if not torch.compiler.is_compiling():
            self._measure(weight)
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            exact = weight if self._exact is None else self._exact
            a, b = a.float(), b.float()
            cross = _linear(a, exact).t() * b
            own = (b @ (a @ a.t())) * b
            squares = self._squares + 2 * scaling * cross.sum(1) + scaling**2 * own.sum(1)
            return squares.clamp_min(0).sqrt()

    def factors(self, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """The magnitude of each row over its norm, (N,), finite for rows of zeros."""
        norms = self.norms(weight, a, b, scaling)
        return self.weight / torch.where(norms == 0, 1.0, norms)

    def update_layer(
        self,
        *,
        base_layer: nn.Module,
        lora_A: Tensor,
        lora_B: Tensor,
        scaling: float,
        place_on_cpu: bool = False,
    ) -> None:
        """Set the magnitudes to the norms that there are, so that the layer begins as what it was."""
        weight = base_layer.weight
        assert isinstance(weight, Tensor)
        if lora_A.is_meta:  # PEFT loads the values afterwards
            norms = torch.empty(weight.shape[0], device="meta")
        else:
            norms = self.norms(weight, lora_A, lora_B, scaling)
        self.weight = nn.Parameter(norms.cpu() if place_on_cpu else norms)

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: nn.Module,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What DoRA adds to the output of the base layer; see PEFT's layer for the arguments."""
        weight, bias = base_layer.weight, base_layer.bias
        assert isinstance(weight, Tensor)
        factor = self.factors(weight, lora_A.weight, lora_B.weight, scaling)  # type: ignore[arg-type]
        if base_result is None:
            base_result = _linear(x, weight)
        elif bias is not None:
            base_result = base_result - bias  # type: ignore[operator]
        return (factor - 1) * base_result + factor * lora_B(lora_A(x)) * scaling  # type: ignore[no-any-return]


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """The matmul in the dtype of x, which a quantized weight takes as it is."""
    return F.linear(x, weight if isinstance(weight, QTensor) else weight.to(x.dtype))


class QuantizedDora(DoraLinearVariant):
    """DoRA over a quantized weight."""

    @staticmethod
    def init(module: QuantizedLoraLinear, adapter_name: str, **kwargs: Any) -> None:
        """Add the magnitudes of an adapter."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        layer = QuantizedDoraLayer()
        layer.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight.detach(),
            lora_B=module.lora_B[adapter_name].weight.detach(),
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = layer

    @staticmethod
    def merge_safe(module: QuantizedLoraLinear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """`orig_weight` (N, K), dense, with the adapter: rows of the sum, scaled as in the forward pass."""
        if not isinstance(
            module.unmerged_weight, QTensor
        ):  # what PEFT's `unmerge` needs, it remembers
            return DoraLinearVariant.merge_safe(module, active_adapter, orig_weight)  # type: ignore[no-any-return]
        layer = module.lora_magnitude_vector[active_adapter]
        factor = layer.factors(
            module.unmerged_weight,
            module.lora_A[active_adapter].weight,
            module.lora_B[active_adapter].weight,
            module.scaling[active_adapter],
        )
        return factor.detach().view(-1, 1) * (orig_weight + module.get_delta_weight(active_adapter))  # type: ignore[no-any-return]


class QALora(QALoraLinearVariant):
    """QA-LoRA: A sees the means of groups of activations, so that BA is one number for each group."""

    @staticmethod
    def get_delta_weight(module: QuantizedLoraLinear, active_adapter: str) -> Tensor:
        """What the adapter adds to the weight, (N, K)."""
        return QALora.shift(module, active_adapter).repeat_interleave(
            module.qalora_group_size[active_adapter], dim=1
        )

    @staticmethod
    def shift(module: QuantizedLoraLinear, active_adapter: str) -> Tensor:
        """What it adds to each weight of a group, (N, K / group).

        PEFT multiplies the mean of a group, a sum over its size, by the number of groups.
        """
        a, b = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        groups = a.shape[1]
        by = module.scaling[active_adapter] * groups / module.qalora_group_size[active_adapter]
        return by * (b.detach().float() @ a.detach().float())  # type: ignore[no-any-return]

    @staticmethod
    def merge_safe(module: QuantizedLoraLinear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """`orig_weight` (N, K), dense, with the adapter."""
        return orig_weight + QALora.get_delta_weight(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: QuantizedLoraLinear, active_adapter: str, orig_weight: Tensor) -> None:
        """The same in place, for weights that are dense by now."""
        orig_weight.data += QALora.get_delta_weight(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def unmerge(module: QuantizedLoraLinear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The inverse of `merge_unsafe`."""
        return orig_weight.data - QALora.get_delta_weight(module, active_adapter).to(
            orig_weight.dtype
        )
