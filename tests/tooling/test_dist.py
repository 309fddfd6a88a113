from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest

from check_dist import dist_problems


def build(package, out):
    """The sdist and the wheel of a package."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def dist(package, tmp_path):
    """The sdist and the wheel of the workspace's package."""
    return build(package, tmp_path / "dist")


@pytest.fixture
def compiled(package, tmp_path):
    """Build the workspace's package as one with C++; its wheel gets these libraries and this tag."""

    def make(libraries, tag):
        (package / "csrc").mkdir()
        (package / "csrc" / "a.cpp").write_text("")
        path = package / "pyproject.toml"
        path.write_text(path.read_text().replace('"/CHANGELOG.md"]', '"/CHANGELOG.md", "/csrc"]'))
        dist = build(package, tmp_path / "dist")
        (wheel,) = dist.glob("*.whl")
        with zipfile.ZipFile(wheel, "a") as archive:
            for name in libraries:
                archive.writestr(f"ao_demo/{name}", b"")
        wheel.rename(dist / wheel.name.replace("py3-none-any", tag))
        return dist

    return make


def test_distributions_of_a_new_package_are_in_order(dist):
    assert dist_problems(dist) == (2, [])


def test_what_does_not_belong_into_a_wheel_is_found(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_x.py", "")
    _, (problem,) = dist_problems(dist)
    assert problem == f"{wheel.name}: tests/test_x.py does not belong into the wheel"


@pytest.mark.parametrize("folder", ["testing", "triton/gates"])
def test_folders_of_development_do_not_belong_into_a_wheel(package, tmp_path, folder):
    path = package / "src" / "ao_demo" / folder
    path.mkdir(parents=True)
    (path / "limits.py").write_text("")
    _, (problem,) = dist_problems(build(package, tmp_path / "dist"))
    assert problem.endswith(f"ao_demo/{folder}/limits.py does not belong into the wheel")


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


def test_a_wheel_with_a_library_for_one_platform_is_in_order(compiled):
    assert dist_problems(compiled(["libdemo.so"], "py3-none-linux_x86_64")) == (2, [])


@pytest.mark.parametrize(
    ("libraries", "tag", "expected"),
    [
        ([], "py3-none-any", "it holds 0 compiled libraries, expected one"),
        (["a.so", "b.so"], "py3-none-linux_x86_64", "it holds 2 compiled libraries"),
        (["a.so"], "py3-none-any", "its tags are py3-none-any, expected py3-none and a platform"),
        (["a.so"], "cp311-cp311-linux_x86_64", "its tags are cp311-cp311-linux_x86_64"),
    ],
)
def test_a_wheel_without_its_library_or_platform_is_found(compiled, libraries, tag, expected):
    _, (problem,) = dist_problems(compiled(libraries, tag))
    assert expected in problem


def test_a_wheel_with_a_library_that_is_too_large_is_found(compiled, monkeypatch):
    dist = compiled(["libdemo.so"], "py3-none-linux_x86_64")
    monkeypatch.setattr("check_dist.MOST_BYTES", 100)
    _, (problem,) = dist_problems(dist)
    assert "bytes, at most 100 are allowed" in problem
