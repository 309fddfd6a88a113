"""Recipes for low-precision or sparse matmuls, and optimizers, by name; imported when asked for."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ao_core import quantize_
from ao_core.ext import registry

#: the recipe that changes nothing: the loss is computed under autocast
PLAIN = "bf16"
#: recipes of 2:4 sparse weights -> the layers that have them, by a part of their names
SPARSE = {"semi_sparse": ".layers.", "semi_sparse_mlp": ".mlp."}


def convert(model: nn.Module, recipe: str) -> None:
    """Have the matmuls of all linear layers but the head computed as a recipe says.

    The weights stay as they are. The head is left out as it usually is: it is small, and its errors
    reach every parameter.

    Args:
        model: changed in place.
        recipe: "bf16" for none, the name of a registered recipe such as "bitnet_training", one of `SPARSE`,
            or what `Float8LinearConfig.from_recipe_name` of ao-float8 takes.

    Raises:
        UnknownNameError: nobody has such a recipe.
        QuantizationError: a layer cannot be converted.
    """
    if recipe == PLAIN:
        return

    def chosen(module: nn.Module, fqn: str) -> bool:
        return isinstance(module, nn.Linear) and fqn != "lm_head"

    if recipe in SPARSE:
        from ao_sparsity import SemiSparseLinear, swap_linear_with_semi_sparse_linear

        linear = [fqn for fqn, module in model.named_modules() if chosen(module, fqn)]
        names = [fqn for fqn in linear if SPARSE[recipe] in fqn]
        swap_linear_with_semi_sparse_linear(model, dict.fromkeys(names, SemiSparseLinear))
        return
    if recipe in registry.recipes:
        quantize_(model, recipe, chosen, strict=True)
        return
    try:
        from ao_float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        registry.recipes.get(recipe)  # raises, and lists what there is
        raise
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=chosen)


def optimizer_class(name: str) -> type[Optimizer]:
    """An optimizer of torch ("AdamW", "Muon", …) or one that a package brings ("AdamW8bit", …).

    Raises:
        UnknownNameError: neither has it.
    """
    found = getattr(torch.optim, name, None)
    if isinstance(found, type) and issubclass(found, Optimizer):
        return found
    return registry.optimizers.get(name)
