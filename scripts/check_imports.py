"""Check who imports whom, with import-linter; contracts are made for the packages that exist.

What import-linter does not see, such as tests and pages, `deep_imports` looks at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from deep_imports import DOOR, problems
from workspace import module_name, packages

#: every module of ao_core, highest first; `|`: not knowing each other, `:`: free, `()`: optional
# --8<-- [start:layers] shown in docs/design.md
CORE_LAYERS = (
    "(ext)",
    "(cli) | (testing)",
    "(checkpoints)",
    (
        "(recipes) : (quantize) : (calibration) : (installing) : (outcome) : (remembering) : (report)"
        " : (targets) : (explanation) : (preparing) : (dequantize)"
    ),
    "(weights)",
    "(ops)",
    "(torch_kernels)",
    "(invariant)",
    "(compute)",
    "(tensor)",
    "(scales)",
    "(dispatch)",
    "(config) : (stacks)",
    "registry : (table) : (guarded) : (plugins) : (plugin_records) : (discovery) : (admission)",
    "hookspecs",
    "(layouts)",
    "(dtypes)",
    "(numerics) | (graph) | (progress)",
    "records : (folder_records) : (interchange_records) : (model_records)",
    (
        "spec : errors : (arguments) : (autograd) : (caches) : (known) : (lazy) : (mapped) : (neutral)"
        " : (regular_files) : (safe_globals) : (schema) : (steps)"
    ),
)
# --8<-- [end:layers]
#: optional or foreign packages, and the modules of ao_core that may import them
OPTIONAL = {
    "typer": ("cli",),
    "rich": ("cli",),
    "yaml": ("cli", "config"),
    "jinja2": ("report",),
    "matplotlib": ("report",),
    "tqdm": ("checkpoints", "progress"),
    "pytest": ("testing",),
    "hypothesis": ("testing",),
    "ml_dtypes": ("testing",),
    "gfloat": ("testing",),
    "numpy": ("testing",),
    "scipy": (),
    "triton": (),
    "torchao": (),
    "transformers": (),
    "diffusers": (),
}


def contracts(modules: list[str], core_parts: list[str]) -> str:
    """The configuration of import-linter for these import packages and these parts of ao_core."""
    siblings = [name for name in modules if name != "ao_core"]
    layers = [" | ".join(siblings), "ao_core"] if siblings else ["ao_core"]
    sections: dict[str, dict[str, str | list[str]]] = {
        "importlinter": {
            "root_packages": modules,
            "include_external_packages": "True",
            "exclude_type_checking_imports": "True",
        },
        "importlinter:contract:siblings": {
            "name": "siblings never import siblings, ao_core imports none of them",
            "type": "layers",
            "layers": layers,
        },
        "importlinter:contract:core": {
            "name": "layers inside ao_core",
            "type": "layers",
            "containers": ["ao_core"],
            "layers": list(CORE_LAYERS),
            "exhaustive": "True",
            "exhaustive_ignores": ["__about__"],
        },
    }
    if siblings:
        sections["importlinter:contract:door"] = {
            "name": f"siblings import nothing of ao_core but {', '.join(DOOR)}",
            "type": "forbidden",
            "source_modules": siblings,
            "forbidden_modules": [f"ao_core.{part}" for part in core_parts if part not in DOOR],
            "allow_indirect_imports": "True",
        }
    for package, allowed in OPTIONAL.items():
        sections[f"importlinter:contract:{package}"] = {
            "name": f"{package}: imported in ao_core by {', '.join(allowed) or 'nothing'}",
            "type": "forbidden",
            "source_modules": [f"ao_core.{part}" for part in core_parts if part not in allowed],
            "forbidden_modules": [package],
            "allow_indirect_imports": "True",
        }
    return "\n".join(
        f"[{title}]\n" + "".join(f"{key} = {setting(value)}\n" for key, value in options.items())
        for title, options in sections.items()
    )


def setting(value: str | list[str]) -> str:
    """A value in the syntax of a configuration file; each item of a list has its own line."""
    return value if isinstance(value, str) else "".join(f"\n    {item}" for item in value)


def main() -> int:
    """Run import-linter over packages/, whose sources are on the path, and find deep imports elsewhere."""
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    folders = packages()
    core = next(path for path in folders if path.name == "ao-core") / "src" / "ao_core"
    parts = sorted(
        path.stem
        for path in core.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
    )
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "contracts.ini"
        config.write_text(contracts([module_name(path) for path in folders], parts))
        status = lint_imports(config_filename=str(config), no_cache=True, no_logo=True)
    found = problems()
    print("\n".join(found) or "No import of a deep module of ao_core outside of ao-core.")
    return int(status != EXIT_STATUS_SUCCESS or bool(found))


if __name__ == "__main__":
    sys.exit(main())
