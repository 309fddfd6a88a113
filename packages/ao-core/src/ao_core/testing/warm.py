"""Programs in processes of their own that need not import torch: they are forks of one that has.

`run_python` is `subprocess.run([sys.executable, …])` without the seconds that importing torch takes. The
first call starts a process that imports `PRELOADED` and nothing of ao, and no more than that: it computes
nothing, so it has no threads that a fork would miss. Each program is then a fork of it, with a `__main__`,
an environment, a search path and a working folder of its own, and ends as any interpreter does.

What a program reads when torch is imported, or when Python starts (`PYTHONHASHSEED`, `OMP_NUM_THREADS`),
is what it was at the first call. Where the system cannot fork safely, programs are started as usual.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

__all__ = ["run_python"]

#: torch imports its compiler, which takes as long again, for any optimizer
PRELOADED = ("torch", "torch._dynamo")


def run_python(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    check: bool = False,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` (a script, ``-c CODE`` or ``-m MODULE``, and its own) in a new process.

    Args:
        arguments: what would stand after ``python`` on a command line.
        env: environment variables; those of this process by default.
        cwd: the working folder; that of this process by default.
        check: raise where the program does not succeed.
        timeout: seconds after which it is killed.

    Returns:
        What the program printed, as text, and how it ended.

    Raises:
        subprocess.CalledProcessError: with `check`, the program failed; with what it printed.
    """
    command = list(map(str, arguments))
    environment = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        if sys.platform == "linux":
            request = {"command": command, "env": environment, "cwd": str(cwd or Path.cwd())}
            code = _ask({**request, "out": str(out), "err": str(err), "timeout": timeout})
        else:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                code = subprocess.run(
                    [sys.executable, *command], env=environment, cwd=cwd, stdin=subprocess.DEVNULL,
                    stdout=stdout, stderr=stderr, timeout=timeout, check=False,
                ).returncode  # fmt: skip
        texts = [path.read_text(encoding="utf-8") for path in (out, err)]
    done = subprocess.CompletedProcess(command, code, *texts)
    if check and code:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done


@cache
def _parent(_pid: int) -> subprocess.Popen[str]:
    """The process that programs are forks of; it ends with this one, or when this one is killed."""
    parent = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(parent.communicate)  # closes what it reads from, and waits
    return parent


def _ask(request: dict[str, Any]) -> int:
    parent = _parent(os.getpid())
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps(request) + "\n")
    parent.stdin.flush()
    return int(json.loads(parent.stdout.readline()))


# -- in the process that is forked -----------------------------------------------------------------


def _serve(requests: IO[str], replies: IO[str], base: list[str]) -> Callable[[], None] | None:
    """Fork for each request, and reply with how it ended; in the fork, returns what to do there."""
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return partial(_become, request, base)
        replies.write(f"{_end(child, request['timeout'])}\n")
        replies.flush()
    return None


def _end(child: int, timeout: float) -> int:
    """Wait for a child, and stop it with all that it started when it takes too long."""
    end, pause = time.monotonic() + timeout, 0.001
    try:
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    except KeyboardInterrupt:
        os.killpg(child, signal.SIGKILL)
        raise
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(request: dict[str, Any], base: list[str]) -> None:
    """Be the program: all of what distinguishes a process, then its code."""
    os.setsid()
    for number, (name, flags) in enumerate(
        [
            (os.devnull, os.O_RDONLY),
            (request["out"], os.O_WRONLY | os.O_CREAT),
            (request["err"], os.O_WRONLY | os.O_CREAT),
        ]
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    kind, *arguments = request["command"]
    own = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [kind, *arguments]
    if kind == "-m":
        import runpy

        sys.path[:] = [request["cwd"], *own, *base]
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    if kind == "-c":
        first, name, source = "", "<string>", arguments[0]
        sys.argv = ["-c", *arguments[1:]]
    else:
        name = main.__file__ = os.path.abspath(kind)
        first, source = os.path.dirname(name), Path(name).read_text(encoding="utf-8")
    sys.path[:] = [first, *own, *base]
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)


def _run(program: Callable[[], None]) -> int:
    """Run a program to its end; its exit code."""
    code = 0
    try:
        program()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            sys.stderr.write(f"{exit_.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    # what the interpreter does when it ends, and multiprocessing in its forks
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _own = {os.path.dirname(os.path.abspath(__file__))}
    _own |= set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _base = [path for path in sys.path if path not in _own]
    for _name in PRELOADED:
        import_module(_name)
    gc.collect()
    gc.freeze()
    if _program := _serve(sys.stdin, sys.stdout, _base):
        # taking hundreds of modules apart that are shared with the parent would take half a second
        os._exit(_run(_program))
