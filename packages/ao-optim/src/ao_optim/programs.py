"""Programs of rules: what an update does to each element, for kernels that know no rule.

A rule is traced: its update is called once with `Traced` in place of tensors, which note what is done to
them. So a rule of anyone's becomes a program, if it uses no other operations than these know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

from ao_optim.rules import Options, Rule

__all__ = ["OPERATIONS", "Program", "Step", "Traced", "Update"]

#: operations of programs, and what of operands a, b, c and the number s they are
OPERATIONS = {
    "scale": "s * a",
    "shift": "a + s",
    "add": "a + s * b",
    "multiply": "a * b",
    "divide": "a / b",
    "over": "s / a",
    "add_product": "a + s * b * c",
    "add_ratio": "a + s * b / c",
    "root": "sqrt(a)",
    "sign": "-1, 0 or 1",
    "magnitude": "abs(a)",
    "at_least": "max(a, s)",
    "at_most": "min(a, s)",
    "constant": "s",
    "above": "1 where a > s, else 0",
    "choose": "b where a is not 0, else c",
    "norm": "the root of the sum of all a**2 of a tensor, for each element; of none that depends on one",
}
#: divisors whose inverses are far from the ends of float32
_LEAST, _GREATEST = 2.0**-100, 2.0**100


class Step(NamedTuple):
    """One operation on registers, each of which holds a number per element."""

    #: one of `OPERATIONS`
    operation: str
    #: the register that is written, which may be an operand
    result: int
    operands: tuple[int, ...]
    number: float


@dataclass(frozen=True)
class Program:
    """What one step does: registers 0, 1, 2, … begin with the parameter, the gradient and the moments."""

    steps: tuple[Step, ...]
    #: registers that hold the parameter and the moments in the end, each another one
    outputs: tuple[int, ...]
    #: how many registers there are
    registers: int


class _UntraceableError(Exception):
    """Something that no program can do."""


@dataclass(frozen=True)
class Update:
    """A step of a rule: all that it depends on but tensors."""

    rule: Rule
    options: Options
    #: counts from 1; a number, or a tensor on the device
    step: Any
    #: go up the gradient
    maximize: bool = False

    @cached_property
    def program(self) -> Program | str:
        """The update as a program, or a sentence that says why there is none."""
        rule = self.rule
        tape: list[Step] = []
        names = [slot.name for slot in rule.slots(self.options)]
        param, grad, *moments = (Traced(tape, place) for place in range(2 + len(names)))
        tape.extend(Step("", place, (), 0.0) for place in range(2 + len(names)))
        state: dict[str, Any] = dict(zip(names, moments, strict=True))
        try:
            rule.update(param, -grad if self.maximize else grad, state, self.options, self.step)  # type: ignore[arg-type]
            return _allocated(tape, [param, *(state[name] for name in names)])
        # of third parties' rules too: the engine runs them, and raises what they raise
        except Exception as error:
            return f"the rule {rule.name} cannot be traced: {error or type(error).__name__}"


class Traced:
    """What stands for a tensor of float32 while a rule is traced: it notes each operation on a tape.

    It has the methods of tensors that `_METHODS` names, in place too, the operators, and the functions of
    torch of the same names. Anything else, and to look at values, raises an error.
    """

    __slots__ = ("_place", "_tape")

    def __init__(self, tape: list[Step], place: int) -> None:
        self._tape, self._place = tape, place

    def __getattr__(self, name: str) -> Callable[..., Traced]:
        method = _METHODS.get(name.removesuffix("_"))
        if method is None or name.startswith("_"):
            raise _UntraceableError(f"it uses {name}, which no program has")

        def call(*args: Any, **kwargs: Any) -> Traced:
            found = method(self, *args, **kwargs)
            if not name.endswith("_"):
                return found
            self._place = found._place
            return self

        return call

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "where" and len(args) == 3 and isinstance(args[0], _Mask):
            return args[0].choose(*args[1:])
        if not args or not isinstance(args[0], cls):
            raise _UntraceableError(f"it uses torch.{name} on something else")
        if name in ("ones_like", "zeros_like") and len(args) == 1 and not kwargs:
            return args[0]._constant(float(name == "ones_like"))
        return getattr(args[0], name)(*args[1:], **kwargs)

    def _note(self, operation: str, *others: Any, number: Any = 0.0) -> Traced:
        if not _is_number(number):
            raise _UntraceableError(f"it uses {operation} with a {type(number).__name__}")
        for other in others:
            if not isinstance(other, Traced) or other._tape is not self._tape:
                raise _UntraceableError(f"it uses {operation} with a {type(other).__name__}")
        operands = (self._place, *(other._place for other in others))
        return self._add(operation, operands, float(number))

    def _constant(self, number: Any) -> Traced:
        return number if isinstance(number, Traced) else self._add("constant", (), float(number))

    def _add(self, operation: str, operands: tuple[int, ...], number: float) -> Traced:
        self._tape.append(Step(operation, len(self._tape), operands, number))
        return Traced(self._tape, len(self._tape) - 1)

    def _refuse(self, *_: Any) -> Any:
        raise _UntraceableError("it looks at values")

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = _refuse
    __eq__ = __ne__ = __le__ = __ge__ = __contains__ = __setitem__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __gt__(self, other: Any) -> _Mask:
        return _Mask(self._note("above", number=other))

    def __lt__(self, other: Any) -> _Mask:
        return _Mask((-self)._note("above", number=-other))

    def __neg__(self) -> Traced:
        return self._note("scale", number=-1.0)

    def __add__(self, other: Any) -> Traced:
        return _add(self, other)

    def __sub__(self, other: Any) -> Traced:
        return _sub(self, other)

    def __rsub__(self, other: Any) -> Traced:
        return _add(-self, other)

    def __mul__(self, other: Any) -> Traced:
        return _mul(self, other)

    def __truediv__(self, other: Any) -> Traced:
        return _div(self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self._note("over", number=other)

    def __pow__(self, exponent: Any) -> Traced:
        return _pow(self, exponent)

    def __abs__(self) -> Traced:
        return self._note("magnitude")

    __radd__, __rmul__ = __add__, __mul__

    def __iadd__(self, other: Any) -> Traced:
        return self._become(self + other)

    def __isub__(self, other: Any) -> Traced:
        return self._become(self - other)

    def __imul__(self, other: Any) -> Traced:
        return self._become(self * other)

    def __itruediv__(self, other: Any) -> Traced:
        return self._become(self / other)

    def _become(self, other: Traced) -> Traced:
        self._place = other._place
        return self


class _Mask:
    """Where a traced tensor compares: what `torch.where` takes, and `&`, but no arithmetic."""

    __slots__ = ("_ones",)

    def __init__(self, ones: Traced) -> None:
        self._ones = ones

    def __and__(self, other: Any) -> _Mask:
        if not isinstance(other, _Mask):
            raise _UntraceableError(f"it uses & with a {type(other).__name__}")
        return _Mask(self._ones * other._ones)

    def choose(self, yes: Any, no: Any) -> Traced:
        """Of two tensors or numbers."""
        return self._ones._note("choose", self._ones._constant(yes), self._ones._constant(no))

    __torch_function__ = Traced.__torch_function__
    __bool__ = __eq__ = Traced._refuse
    __hash__ = None  # type: ignore[assignment]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _add(x: Traced, other: Any, *, alpha: float = 1.0) -> Traced:
    if _is_number(other):
        return x._note("shift", number=other * alpha)
    return x._note("add", other, number=alpha)


def _sub(x: Traced, other: Any, *, alpha: float = 1.0) -> Traced:
    return _add(x, other, alpha=-alpha)


def _mul(x: Traced, other: Any) -> Traced:
    return x._note("scale", number=other) if _is_number(other) else x._note("multiply", other)


def _div(x: Traced, other: Any) -> Traced:
    if not _is_number(other):
        return x._note("divide", other)
    if not _LEAST < abs(other) < _GREATEST:
        raise _UntraceableError(f"it divides by {other}")
    return x._note("scale", number=1.0 / other)  # which takes less time than to divide


def _pow(x: Traced, exponent: Any) -> Traced:
    if _is_number(exponent) and exponent == 2:
        return _square(x)
    if _is_number(exponent) and exponent == 0.5:
        return x._note("root")
    raise _UntraceableError(f"it uses the power {exponent}")


def _square(x: Traced) -> Traced:
    return x._note("multiply", x)


def _addcmul(x: Traced, a: Any, b: Any, *, value: float = 1.0) -> Traced:
    return x._note("add_product", a, b, number=value)


def _addcdiv(x: Traced, a: Any, b: Any, *, value: float = 1.0) -> Traced:
    return x._note("add_ratio", a, b, number=value)


def _lerp(x: Traced, end: Any, weight: Any) -> Traced:
    if not _is_number(weight):
        raise _UntraceableError(f"it uses lerp with a {type(weight).__name__}")
    way = _sub(end, x) if isinstance(end, Traced) else x._note("add", end)
    # from the nearer end, as torch does
    return _add(x, way, alpha=weight) if abs(weight) < 0.5 else _add(end, way, alpha=weight - 1)


def _clamp(x: Traced, min: Any = None, max: Any = None) -> Traced:
    if min is not None:
        x = x._note("at_least", number=min)
    return x if max is None else x._note("at_most", number=max)


def _same(x: Traced) -> Traced:
    return Traced(x._tape, x._place)


#: methods of tensors
_METHODS: Mapping[str, Callable[..., Traced]] = {
    "abs": lambda x: x._note("magnitude"),
    "add": _add,
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clamp_min": lambda x, min: _clamp(x, min),
    "clone": _same,
    "copy": lambda x, other: _same(other),
    "detach": lambda x: x,  # of one memory: what changes one changes the other
    "div": _div,
    "float": lambda x: x,
    "lerp": _lerp,
    "mul": _mul,
    "neg": lambda x: -x,
    "norm": lambda x: x._note("norm"),
    "pow": _pow,
    "reciprocal": lambda x: x._note("over", number=1.0),
    "rsqrt": lambda x: x._note("root")._note("over", number=1.0),
    "sign": lambda x: x._note("sign"),
    "sqrt": lambda x: x._note("root"),
    "square": _square,
    "sub": _sub,
}


def _check_norms(tape: list[Step]) -> None:
    """One pass finds all norms: none may depend on another."""
    depending: set[int] = set()
    for place, step in enumerate(tape):
        depends = not depending.isdisjoint(step.operands)
        if depends and step.operation == "norm":
            raise _UntraceableError("it uses the norm of what depends on another norm")
        if depends or step.operation == "norm":
            depending.add(place)


def _allocated(tape: list[Step], ends: list[Any]) -> Program:
    """The program of a tape, whose steps each have a result of their own: in as few registers as it can.

    The first of `tape` are the inputs, and `ends` the traced parameter and moments.
    """
    places: list[int] = []
    for end in ends:
        if not isinstance(end, Traced) or end._tape is not tape:
            raise _UntraceableError(f"it makes a moment a {type(end).__name__}")
        taken = end._place in places
        places.append(end._note("scale", number=1.0)._place if taken else end._place)
    if wrong := next((step for step in tape if not isfinite(step.number)), None):
        raise _UntraceableError(f"it uses {wrong.operation} with {wrong.number}")
    _check_norms(tape)
    last = {place: number for number, step in enumerate(tape) for place in step.operands}
    last.update((place, len(tape)) for place in places)
    registers: dict[int, int] = {}
    free: list[int] = []
    steps = []
    for number, step in enumerate(tape):
        if not step.operation:
            registers[number] = number
            continue
        if number not in last:
            continue  # its result is never read
        operands = tuple(registers[place] for place in step.operands)
        free += sorted({registers[p] for p in step.operands if last[p] == number}, reverse=True)
        if not free:
            free.append(1 + max(registers.values()))
        registers[number] = free.pop()
        steps.append(Step(step.operation, registers[number], operands, step.number))
    outputs = tuple(registers[place] for place in places)
    return Program(tuple(steps), outputs, 1 + max(registers.values()))
