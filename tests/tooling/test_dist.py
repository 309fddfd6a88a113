from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest

from check_dist import dist_problems


@pytest.fixture
def dist(package, tmp_path):
    """The sdist and the wheel of the workspace's package."""
    out = tmp_path / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_distributions_of_a_new_package_are_in_order(dist):
    assert dist_problems(dist) == (2, [])


def test_what_does_not_belong_into_a_wheel_is_found(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_x.py", "")
    _, (problem,) = dist_problems(dist)
    assert problem == f"{wheel.name}: tests/test_x.py does not belong into the wheel"


def test_a_wheel_of_another_version_is_found(dist):
    (wheel,) = dist.glob("*.whl")
    other = dist / wheel.name.replace("0.1.0", "0.2.0")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name.replace("0.1.0", "0.2.0"), old.read(name))
    wheel.unlink()
    _, problems = dist_problems(dist)
    assert problems == [
        f"{other.name}: metadata says version 0.1.0",
        f"{other.name}: ao_demo/__about__.py has another version",
    ]


def test_a_wheel_without_its_sdist_is_found(dist):
    (sdist,) = dist.glob("*.tar.gz")
    sdist.unlink()
    count, (problem,) = dist_problems(dist)
    assert count == 1
    assert problem.endswith("1 wheels and 0 sdists")


def test_an_empty_folder_is_a_problem(tmp_path):
    count, problems = dist_problems(tmp_path)
    assert (count, len(problems)) == (0, 1)


def test_an_sdist_without_tests_is_found(package, tmp_path):
    shutil.rmtree(package / "tests")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "out")]
    subprocess.run([*command, str(package)], capture_output=True, check=True)
    _, (problem,) = dist_problems(tmp_path / "out")
    assert problem == "ao_demo-0.1.0.tar.gz: it holds no tests"
