"""Every registered optimizer passes the suite, and every rule in every format converges."""

from __future__ import annotations

import ao_optim
from ao_core.testing import OptimizerSuite
from ao_optim import optimizers

_OPTIONS = {
    "GaLore": {"rank": 48, "update_gap": 5, "scale": 1.0},
}

for _cls in (
    ao_optim.CPUOffloadOptimizer,
    ao_optim.GaLore,
    *map(vars(optimizers).get, optimizers.__all__),
):
    _name = f"Test{_cls.__name__}"
    _options = {"lr": 0.05, **_OPTIONS.get(_cls.__name__, {})}
    globals()[_name] = type(
        _name, (OptimizerSuite,), {"optimizer": _cls.__name__, "options": _options}
    )
