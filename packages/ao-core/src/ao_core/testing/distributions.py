"""`PluginSuite`: what a distribution must do before its records count, and the probe of its import."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ao_core.plugins import problems
from ao_core.testing.base import Suite
from ao_core.testing.warm import run_python

__all__ = ["PluginSuite", "same_distribution"]

_PROBE = "import sys; from ao_core.testing.importing import main; main(sys.argv[1])"


class PluginSuite(Suite):
    """Tests of an installed distribution as a plugin; its records have suites of their own.

    Attributes:
        provider: the name of the distribution, such as "ao-marlin".
        elements: how many tensor elements one operation of torch may read and write while the plugin is
            imported. Tables of number formats stay below it.
    """

    provider: str
    elements: int = 65536

    def test_no_problem(self) -> None:
        """The host leaves nothing of it out: requirements, import, API version, hooks, names, speed.

        The other suites cannot see that: what is left out is not tried.
        """
        found = [p for p in problems() if same_distribution(p.dist, self.provider)]
        assert not found, "\n".join(map(str, found))

    def test_import_computes_nothing(self) -> None:
        """Its modules can be imported in a new process, and run no large operation of torch by that."""
        # only the modules of this plugin, and all that this process could import
        path = os.pathsep.join(filter(None, sys.path))
        done = run_python("-c", _PROBE, self.provider, env={**os.environ, "PYTHONPATH": path})
        assert not done.returncode, f"plugin {self.provider} cannot be imported:\n{done.stderr}"
        ran: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        large = [each for each in ran if each["elements"] > self.elements]
        assert not large, (
            f"plugin {self.provider} computes while it is imported: {large[0]['op']} with "
            f"{large[0]['elements']} elements in {large[0]['module']}; do that in the functions that its "
            "records carry, when they are first called"
        )


def same_distribution(a: str, b: str) -> bool:
    """Whether two names are those of one distribution."""
    return a.lower().replace("_", "-") == b.lower().replace("_", "-")
