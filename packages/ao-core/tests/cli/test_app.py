"""The command as a program: start, errors, plugins' commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from ao_core.cli import app, main
from ao_core.testing.warm import run_python


def environment(**env):
    # wide, so that help and tables are not wrapped
    full = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "AO_PLUGINS": "", **env}
    full.pop("AO_DEBUG", None) if "AO_DEBUG" not in env else None
    return full


def run(*args, **env):
    return run_python("-m", "ao_core.cli", *args, env=environment(**env))


@pytest.mark.slow
def test_module_runs():
    done = run("formats")
    assert (done.returncode, done.stderr) == (0, "")
    assert "f8e4m3" in done.stdout


def test_help_lists_all_commands_and_imports_no_torch():
    code = (
        "import sys\n"
        "from ao_core.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
    for name in ("plugins", "formats", "explain", "inspect", "quantize"):
        assert f" {name} " in done.stdout


def test_version(ao):
    result = ao("--version")
    assert (result.exit_code, result.stdout) == (0, f"ao {version('ao-core')}\n")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    # a text as the code: Python prints it on stderr and exits with 1
    assert f"needs the package '{missing}'" in exit_info.value.code
    assert 'pip install "ao-core[cli]"' in exit_info.value.code


@pytest.mark.slow
def test_error_is_one_line_on_stderr(tmp_path):
    done = run("inspect", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ao: ")
    assert "there is no such directory or file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_debug_shows_the_traceback(tmp_path):
    done = run("inspect", str(tmp_path / "absent"), AO_DEBUG="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "CheckpointError" in done.stderr


def test_unforeseen_error_names_its_type(ao, monkeypatch):
    monkeypatch.delenv("AO_DEBUG", raising=False)

    def broken(path):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("ao_core.tensor.saving.open_checkpoint", broken)
    result = ao("inspect", "x")
    assert result.exit_code == 2
    assert result.stderr == "ao: RuntimeError: two lines (AO_DEBUG=1 shows where)\n"


@pytest.mark.parametrize("args", [["inspect"], ["nonsense"], ["quantize", "a", "b"]])
def test_usage_errors_are_typers(ao, args):
    result = ao(*args)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


@pytest.fixture
def plugin(tmp_path):
    """An installed distribution whose plugin adds a command; returns the environment to see it."""
    (tmp_path / "ao_hello.py").write_text(
        "from ao_core import hookimpl\n"
        "@hookimpl\ndef ao_api(): return (0, 1)\n"
        "@hookimpl\ndef ao_cli(app):\n"
        "    @app.command()\n"
        "    def hello(name: str):\n"
        "        'Say hello.'\n"
        "        if name == 'bad': raise ValueError('no such name')\n"
        "        print('hello', name)\n"
    )
    info = tmp_path / "ao_hello-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ao-hello\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[ao.plugins]\nhello = ao_hello\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "AO_PLUGINS": "hello"}


@pytest.mark.slow
def test_command_of_a_plugin(plugin):
    done = run("hello", "world", **plugin)
    assert (done.returncode, done.stdout) == (0, "hello world\n")
    assert " hello " in run("--help", **plugin).stdout
    failed = run("hello", "bad", **plugin)
    assert (failed.returncode, failed.stderr.split(" (")[0]) == (2, "ao: ValueError: no such name")


def test_plugins_are_loaded_only_where_they_may_matter(monkeypatch):
    monkeypatch.setattr(app, "_some_plugin_has_commands", lambda: True)
    assert app._needs_plugins([])
    assert app._needs_plugins(["--help"])
    assert app._needs_plugins(["hello", "--x"])
    assert not app._needs_plugins(["quantize", "--help"])
    assert not app._needs_plugins(["--version"])
    monkeypatch.setattr(app, "_some_plugin_has_commands", lambda: False)
    assert not app._needs_plugins(["--help"])


def test_sources_tell_who_may_have_commands(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet_ao").mkdir()
    (tmp_path / "quiet_ao" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "quiet_ao" / "plugin.py").write_text("def ao_dtypes(): return []")
    (tmp_path / "loud_ao.py").write_text("def ao_cli(app): pass")
    assert not app._may_define_commands("quiet_ao.plugin")
    assert app._may_define_commands("loud_ao")
    assert app._may_define_commands("absent_ao.plugin")


def test_application_is_typers():
    assert isinstance(app.make_app(), typer.Typer)
