"""What algorithms answer, and what they raise: checked, with the weight or block that it is of."""

from __future__ import annotations

from collections.abc import Callable

from ao_core.calibration.matrices import matrix_shape
from ao_core.errors import AoError, ConfigError, QuantizationError
from ao_core.records import Algorithm, Skip, Solved
from ao_core.targets import Decision
from ao_core.tensor import QTensor

__all__ = ["checked_answer", "guarded"]


def guarded(solver: Algorithm, name: str, solve: Callable[[], object]) -> object:
    """What an algorithm answers.

    Raises:
        AoError: it fails; names the weight or the block.
    """
    try:
        return solve()
    except (ConfigError, QuantizationError) as error:
        raise type(error)(f"{name}: {error}") from error
    except AoError:
        raise
    except Exception as error:
        raise QuantizationError(
            f"{name}: the algorithm {solver.name!r} raised {type(error).__name__}: {error}"
        ) from error


def checked_answer(solver: Algorithm, entry: Decision, found: object) -> Solved | Skip:
    """The answer for a weight.

    Raises:
        QuantizationError: it is something else; names the weight.
    """
    if not isinstance(found, (Solved, Skip)):
        raise QuantizationError(
            f"{entry.fqn}: the algorithm {solver.name!r} answered a {type(found).__name__}, not Solved or "
            "Skip"
        )
    if isinstance(found, Solved) and found.values is not None:
        quantized = isinstance(found.values, QTensor)
        shape = tuple(entry.tensor.shape)
        wanted = shape if quantized else matrix_shape(shape, entry.owners[0])
        if tuple(found.values.shape) != wanted:
            raise QuantizationError(
                f"{entry.fqn}: what the algorithm {solver.name!r} found has the shape "
                f"{tuple(found.values.shape)}, not {wanted}"
            )
    return found
