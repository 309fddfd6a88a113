"""Programs that are forks behave as those that are started."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from ao_core.testing.warm import run_python

SHOW = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.getcwd(), dict(os.environ), sys.path[:3],
                  [name for name in sys.modules if name.startswith("ao_")],
                  len(os.listdir("/proc/self/task"))]))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_it_has_what_it_was_given_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_HERE", "1")
    env = {"PYTHONPATH": "/first:/second", "AO_THERE": "2"}
    done = run_python("-c", SHOW, "one", 2, env=env, cwd=tmp_path)
    name, argv, cwd, environment, path, of_ao, threads = json.loads(done.stdout)
    assert (name, argv, cwd) == ("__main__", ["-c", "one", "2"], str(tmp_path))
    assert environment == env
    assert path == ["", "/first", "/second"]
    assert (of_ao, threads) == ([], 1)
    assert (done.returncode, done.stderr) == (0, "to stderr\n")


def test_scripts_and_modules(tmp_path):
    (tmp_path / "beside.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    (tmp_path / "script.py").write_text("import beside\nprint(__name__, __file__)")
    done = run_python("script.py", cwd=tmp_path)
    assert done.stdout == f"beside []\n__main__ {tmp_path / 'script.py'}\n"
    assert run_python("-m", "beside", "x", cwd=tmp_path).stdout == "__main__ ['x']\n"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why"),
        ("raise SystemExit", 0, ""),
        ("import os; os.abort()", -6, ""),
        ("import atexit; atexit.register(print, 'last')", 0, ""),
    ],
)
def test_ends(code, status, error):
    done = run_python("-c", code)
    assert done.returncode == status
    assert done.stderr.rstrip().endswith(error)
    assert done.stdout == ("last\n" if "atexit" in code else "")


def test_a_failure_raises_where_that_is_asked_for(capsys):
    with pytest.raises(subprocess.CalledProcessError):
        run_python("-c", "raise SystemExit('why')", check=True)
    assert capsys.readouterr().err == "why\n"


def test_threads_of_a_program_end_before_it():
    code = """
import concurrent.futures, threading, time
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(print, "pool")
threading.Timer(0.05, print, ["thread"]).start()
"""
    assert run_python("-c", code).stdout == "pool\nthread\n"


def test_what_takes_too_long_is_killed_with_what_it_started(tmp_path):
    code = """
import os, sys, time
if not os.fork():
    time.sleep(1)
    open(sys.argv[1], "w")
time.sleep(9)
"""
    start = time.monotonic()
    assert run_python("-c", code, tmp_path / "late", timeout=0.3).returncode == -9
    assert time.monotonic() - start < 5
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_programs_do_not_see_each_other():
    run_python("-c", "import sys, torch; torch.seen = sys.seen = True", check=True)
    run_python("-c", "import sys, torch\nassert not hasattr(torch, 'seen')", check=True)
