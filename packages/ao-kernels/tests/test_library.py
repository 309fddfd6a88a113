"""Finding and loading the C++ library, in fresh processes because it is loaded once in each."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from ao_core.testing.warm import run_python
from ao_kernels.cpu import library

ISAS = ("generic", "avx2", "avx2_vnni", "avx512_vnni", "avx512", "amx")
ISAS += ("neon", "neon_dotprod", "neon_i8mm")


def run(code, **env):
    """What a fresh process prints; variables of this process that steer the library are left out."""
    free = {key: value for key, value in os.environ.items() if not key.startswith("AO_CPU_")}
    return run_python("-c", code, env={**free, **env}, check=True).stdout.strip()


WHY_NOT = "from ao_kernels.cpu import library; print(library.unavailable())"


def test_the_library_serves():
    assert library.unavailable() is None
    library.load()
    assert library.isa() in library.usable_isas()
    assert set(library.usable_isas()) <= set(ISAS)


def test_importing_the_package_and_its_plugin_does_not_load_the_library():
    code = (
        "import ao_kernels, ao_kernels.plugin, torch\n"
        "from ao_kernels.cpu import library\n"
        "print(str(library.library_path()) in torch.ops.loaded_libraries, library.unavailable(),\n"
        "      str(library.library_path()) in torch.ops.loaded_libraries)"
    )
    assert run(code) == "False None True"


def test_each_instruction_set_of_the_processor_can_be_chosen_and_the_best_one_is():
    usable = run("from ao_kernels.cpu import library; print(*library.usable_isas())").split()
    for isa in ("", *usable):
        code = "from ao_kernels.cpu import library; print(library.isa(), *library.usable_isas())"
        assert run(code, AO_CPU_ISA=isa).split() == [isa or usable[0], *usable]
    assert usable[-1] == "generic"


def test_plugins_names_the_instruction_set_and_the_others():
    code = "from ao_kernels.plugin import ao_machine; print(*ao_machine())"
    sentence = run(code, AO_CPU_ISA="generic")
    assert sentence.startswith("C++ kernels of the instruction set generic; AO_CPU_ISA can name ")
    others = sentence.partition(" can name ")[2].split(", ")
    assert [*others, "generic"] == library.usable_isas()
    assert run(code, AO_CPU_ISA="mmx") == ""


@pytest.mark.parametrize("wrong", ["sse", "AVX2", "avx512 "])
def test_an_unknown_instruction_set_is_refused_with_those_that_would_work(wrong):
    reason = run(WHY_NOT, AO_CPU_ISA=wrong)
    assert f"AO_CPU_ISA={wrong}: no such instruction set; usable here: " in reason
    assert reason.endswith("generic")


def test_an_empty_choice_is_none():
    assert run(WHY_NOT, AO_CPU_ISA="") == "None"


def test_a_missing_library_is_named(tmp_path):
    path = tmp_path / "libao_cpu.so"
    reason = run(WHY_NOT, AO_CPU_LIBRARY=str(path))
    assert reason == f"the CPU kernels of ao-kernels are missing: there is no file {path}"


def test_a_library_that_was_not_built_says_why(tmp_path):
    (tmp_path / "not_built.txt").write_text("no C++ compiler was found (tried g++)\n")
    reason = run(WHY_NOT, AO_CPU_LIBRARY=str(tmp_path / "libao_cpu.so"))
    assert reason.startswith(
        "ao-kernels was installed without its CPU kernels, because no C++ compiler was found"
    )
    assert "install it again with" in reason


def test_a_damaged_library_is_a_reason_and_no_crash(tmp_path):
    path = tmp_path / "libao_cpu.so"
    path.write_bytes(b"\x7fELF and nothing more")
    reason = run(WHY_NOT, AO_CPU_LIBRARY=str(path))
    assert reason.startswith("the CPU kernels of ao-kernels cannot be used: ")
    assert str(path) in reason


def test_an_older_torch_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert library._load() == ("the CPU kernels of ao-kernels need torch >= 2.11, found 2.10.1+cpu")


@pytest.fixture
def fresh(monkeypatch):
    """The module as if nothing had been loaded; restores what was."""
    monkeypatch.setattr(library, "_outcome", None)


def test_what_cannot_be_loaded_raises_its_reason(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("AO_CPU_LIBRARY", str(tmp_path / "none.so"))
    for call in (library.load, library.isa, library.usable_isas):
        with pytest.raises(RuntimeError, match="there is no file"):
            call()


def test_threads_that_ask_at_once_load_it_once(fresh, monkeypatch):
    calls = []
    ready = threading.Barrier(8)

    def slow_load():
        calls.append(threading.get_ident())
        threading.Event().wait(0.05)

    def ask():
        ready.wait()
        reasons.append(library.unavailable())

    reasons: list[str | None] = []
    monkeypatch.setattr(library, "_load", slow_load)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert reasons == [None] * 8
