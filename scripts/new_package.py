"""Make a package from scripts/template: `python scripts/new_package.py ao-optim "Optimizers"`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from check_packages import fill, template_files
from workspace import ROOT


def new_package(name: str, summary: str, root: Path = ROOT) -> Path:
    """Write packages/NAME and return its folder.

    Raises:
        ValueError: the name is not of the form `ao-word`, or the summary is empty or not one line.
        FileExistsError: the folder exists.
    """
    if not re.fullmatch(r"ao-[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"name={name!r}: must be `ao-` and lowercase words, such as ao-optim")
    if not summary.strip() or re.search(r'[\n"\\]', summary):
        raise ValueError(f"summary={summary!r}: must be one line without quotes or backslashes")
    package = root / "packages" / name
    package.mkdir(parents=True)
    for place, source in template_files(name).items():
        target = package / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = fill(source.read_text(encoding="utf-8"), name)
        target.write_text(text.replace("SUMMARY", summary.strip()), encoding="utf-8")
    shutil.copy(root / "LICENSE", package / "LICENSE")
    return package


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the distribution, such as ao-optim")
    parser.add_argument("summary", help="one line that says what the package does")
    arguments = parser.parse_args()
    try:
        print(f"made {new_package(arguments.name, arguments.summary).relative_to(ROOT)}")
    except (ValueError, FileExistsError) as error:
        sys.exit(f"error: {error}")
