"""Layouts that store fewer values than a tensor has."""

from __future__ import annotations

from ao_sparsity.layouts.bsr import Bsr
from ao_sparsity.layouts.cslt import Cslt
from ao_sparsity.layouts.cutlass import Cutlass
from ao_sparsity.layouts.two_four import TwoFour

__all__ = ["LAYOUTS", "Bsr", "Cslt", "Cutlass", "TwoFour"]

LAYOUTS = (TwoFour(), Bsr(), Cutlass(), Cslt())
