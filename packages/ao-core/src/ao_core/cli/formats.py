"""`ao formats`: number formats, layouts, ways to choose scales, recipes and methods, with their providers."""

from __future__ import annotations

from typing import Any

from ao_core.cli.output import JSON, show_json, show_table

__all__ = ["formats"]


def formats(as_json: bool = JSON) -> None:
    """List number formats, layouts, ways to choose scales, recipes and methods, and who provides each."""
    found = _found()
    if as_json:
        show_json(found)
        return
    show_table(
        "Number formats",
        ("name", "bits", "kind", "range", "provider", "summary"),
        [
            (r["name"], str(r["bits"]), r["kind"], f"{r['min']:g} … {r['max']:g}", r["provider"],
             r["summary"])
            for r in found["dtypes"]
        ],
        right=(1,),
    )  # fmt: skip
    show_table(
        "Layouts",
        ("name", "in checkpoints", "chosen on", "provider"),
        [
            (
                r["name"],
                "yes" if r["canonical"] else f"as {r['canonical_name']}",
                ", ".join(r["auto_devices"]) or "-",
                r["provider"],
            )
            for r in found["layouts"]
        ],
    )
    show_table(
        "Ways to choose scales",
        ("name", "provider", "summary"),
        [(r["name"], r["provider"], r["summary"]) for r in found["scale_methods"]],
    )
    show_table(
        "Recipes, for quantize_ and ao quantize --config",
        ("name", "provider", "summary"),
        [(r["name"], r["provider"], r["summary"]) for r in found["recipes"]],
    )
    show_table(
        "Methods, for names such as METHOD/RECIPE or METHOD+METHOD/RECIPE; they need data",
        ("name", "provider", "summary"),
        [(r["name"], r["provider"], r["summary"]) for r in found["methods"]],
    )


def _found() -> dict[str, list[dict[str, Any]]]:
    from ao_core import stacks
    from ao_core.registry import registry

    dtypes = [
        {
            "name": name,
            "bits": dtype.bits,
            "kind": dtype.kind,
            "min": dtype.min,
            "max": dtype.max,
            "provider": registry.dtypes.provider(name),
            "summary": dtype.summary,
        }
        for name, dtype in registry.dtypes.items()
    ]
    layouts = [
        {
            "name": name,
            "canonical": layout.canonical,
            "canonical_name": layout.canonical_name
            or (name if layout.canonical else "its format says"),
            "auto_devices": list(layout.auto_devices),
            "provider": registry.layouts.provider(name),
        }
        for name, layout in registry.layouts.items()
    ]
    scales = [
        {"name": name, "provider": registry.scale_methods.provider(name), "summary": method.summary}
        for name, method in registry.scale_methods.items()
    ]
    recipes = [
        {
            "name": name,
            "arguments": repr(recipe.config),
            "provider": registry.recipes.provider(name),
            "summary": recipe.summary,
            "short": recipe.short,
        }
        for name, recipe in registry.recipes.items()
    ]
    # every configuration is a recipe too, under the name of its transform
    recipes += [
        {
            "name": name,
            "arguments": f"{transform.config_type.__name__}()",
            "provider": registry.transforms.provider(name),
            "summary": _first_line(transform.config_type.__doc__),
        }
        for name, transform in registry.transforms.items()
        if name not in registry.recipes
    ]
    methods = [
        {
            "name": name,
            "provider": table.provider(name),
            "summary": _first_line(table.get(name).config_type.__doc__),
        }
        for table in (registry.algorithms, registry.model_transforms)
        for name in stacks.methods()
        if name in table
    ]
    return {
        "dtypes": dtypes,
        "layouts": layouts,
        "scale_methods": scales,
        "recipes": recipes,
        "methods": methods,
    }


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0]
