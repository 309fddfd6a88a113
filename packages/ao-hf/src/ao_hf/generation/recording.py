"""The ops that a function calls, as a graph: exactly what ran is compiled, after all decisions of Python."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from ao_core.ext import UnsupportedOp

__all__ = ["constants_of", "record", "written_in"]

#: ops that give numbers to Python, which are not part of a graph
_NUMBERS = (torch.ops.aten._local_scalar_dense.default,)


class _Recorder(TorchDispatchMode):
    """Notes each op on plain tensors; quantized tensors call such ops in turn."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root = nn.Module()
        self.graph = fx.Graph()
        #: by the address of a tensor, which is kept, so that no other gets the address
        self.nodes: dict[int, fx.Node] = {}
        self._kept: list[Any] = []
        for name, tensor in inputs.items():
            self._know(tensor, self.graph.placeholder(name))

    def _know(self, tensor: Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _node(self, x: Any) -> Any:
        """The node that made a tensor, or a buffer for one that was there before."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            name = f"constant_{len(self.root._buffers)}"
            self.root.register_buffer(name, x.detach())
            self._know(x, self.graph.get_attr(name))
        return self.nodes[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # it says what it does in plain tensors
        if func in _NUMBERS:
            return func(*args, **kwargs)
        given = tree_map(self._node, args), tree_map(self._node, kwargs)
        out = func(*args, **kwargs)
        node = self.graph.call_function(func, *given)
        if isinstance(out, Tensor):
            self._know(out, node)
        elif isinstance(out, (tuple, list)):
            for place, one in enumerate(out):
                if isinstance(one, Tensor):
                    self._know(one, self.graph.call_function(operator.getitem, (node, place)))
        return out


def record(
    function: Callable[[], Any], inputs: Mapping[str, Tensor], output: Callable[[Any], Tensor]
) -> tuple[Any, fx.GraphModule]:
    """Run a function, and take down the ops that lead from the inputs to a tensor of its result.

    All other tensors that ops read or write are buffers of the graph, in the memory that they have. Numbers
    that Python took out of tensors are fixed.

    Args:
        function: called once.
        inputs: name -> tensor, as the function uses them.
        output: result -> the tensor that the graph returns.

    Returns:
        What the function returned, and the graph.

    Raises:
        UnsupportedOp: a tensor that is written to has memory in common with another one, so that the order
            of ops might not be kept.
    """
    recorder = _Recorder(inputs)
    with recorder:
        result = function()
    made = recorder.nodes.get(id(output(result)))
    if made is None:
        raise UnsupportedOp("the result of the function is not made by ops of torch")
    recorder.graph.output(made)
    recorder.graph.eliminate_dead_code()
    module = fx.GraphModule(recorder.root, recorder.graph)
    _check_written(module)
    return result, module


def constants_of(module: fx.GraphModule) -> dict[str, Tensor]:
    """The buffers that a graph uses, by name."""
    names = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    return {name: x for name, x in module.named_buffers() if name in names}


def written_in(module: fx.GraphModule) -> dict[str, Any]:
    """The buffers that a graph writes to, by name, and the first op that does."""
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            for x in tree_leaves(given) if argument.is_write else ():
                if isinstance(x, fx.Node) and x.op == "get_attr":
                    found.setdefault(str(x.target), node.target)
    return found


def _check_written(module: fx.GraphModule) -> None:
    constants = constants_of(module)
    storages = [x.untyped_storage().data_ptr() for x in constants.values()]
    for name, op in written_in(module).items():
        if storages.count(constants[name].untyped_storage().data_ptr()) > 1:
            raise UnsupportedOp(f"{op} writes to memory of several tensors")
