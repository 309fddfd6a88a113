"""Floating-point formats of at most 8 bits, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.errors import ConfigError

__all__ = ["E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "FloatFormat", "float_format"]


@dataclass(frozen=True)
class FloatFormat:
    """Sign, `ebits` of exponent, `mbits` of mantissa, with subnormals and both zeros.

    With `has_inf` the greatest exponent is reserved as in IEEE 754: mantissa 0 is infinity, the
    rest is NaN. With `has_nan` alone only the greatest magnitude is NaN. With neither, all codes
    are finite. Sources: OCP 8-bit Floating Point (E4M3, E5M2) and OCP Microscaling Formats v1.0.
    """

    ebits: int
    mbits: int
    #: what is subtracted from the stored exponent
    bias: int
    has_inf: bool = False
    has_nan: bool = False

    def __post_init__(self) -> None:
        # decode_float reads codes as float16, whose greatest exponent holds infinities and NaN.
        if not (1 <= self.ebits <= 4 + self.has_inf and self.mbits >= 1 and self.bits <= 8):
            raise ConfigError(
                f"ebits={self.ebits}, mbits={self.mbits}: a float has 1 to 4 bits of exponent "
                "(5 with has_inf=True), at least 1 of mantissa, and at most 8 in all with the sign"
            )
        if abs(self.bias) > 60:
            raise ConfigError(f"bias={self.bias}: must lie between -60 and 60")
        if self.has_inf and not (self.has_nan and self.ebits == 5):
            raise ConfigError(
                f"has_inf=True with has_nan={self.has_nan}, ebits={self.ebits}: only a shortened "
                "float16 may have infinities; use has_nan=True and ebits=5"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.ebits + self.mbits

    @property
    def codes(self) -> int:
        """Number of codes, NaN and infinities included."""
        return 1 << self.bits

    @property
    def nan_code(self) -> int:
        """All bits but the sign: the code that NaN becomes where `has_nan`."""
        return self.codes // 2 - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the greatest finite number."""
        return (1 << self.ebits) - 1 - self.bias - self.has_inf

    @property
    def max(self) -> float:
        """Greatest finite value."""
        spare = 2 if self.has_nan and not self.has_inf else 1
        return ((2 << self.mbits) - spare) * 2.0 ** (self.emax - self.mbits)

    @property
    def smallest_normal(self) -> float:
        """Least value with a full mantissa."""
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """Least positive value."""
        return 2.0 ** (self.emin - self.mbits)


def float_format(ebits: int, mbits: int) -> FloatFormat:
    """A format without infinities and NaN, with the bias 2**(ebits-1) - 1."""
    return FloatFormat(ebits, mbits, bias=(1 << max(ebits - 1, 0)) - 1)


#: OCP 8-bit Floating Point, to ±448, with NaN and without infinities
E4M3 = FloatFormat(ebits=4, mbits=3, bias=7, has_nan=True)
#: OCP 8-bit Floating Point, to ±57344, with NaN and infinities: the upper byte of float16
E5M2 = FloatFormat(ebits=5, mbits=2, bias=15, has_inf=True, has_nan=True)
#: OCP Microscaling Formats v1.0, 6 bits, to ±28
E3M2 = float_format(3, 2)
#: OCP Microscaling Formats v1.0, 6 bits, to ±7.5
E2M3 = float_format(2, 3)
#: OCP Microscaling Formats v1.0, 4 bits, to ±6
E2M1 = float_format(2, 1)
