"""What was measured, on disk: written whole or not at all, and harmless where it is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import TestCase

import pytest
import torch

from ao_kernels.triton.tuning import store as files
from ao_kernels.triton.tuning.store import Device, Problem, Record, Store, bucket, store_of

PROBLEM = Problem("matmul", ("int4", 128, torch.bfloat16, None), 4096, 1024, 16)
RECORD = Record(
    str(PROBLEM), {"rows": 16, "splits": 4}, (({"rows": 16, "splits": 4}, 8.25),),
    ({"rows": 32, "splits": 1},), ({"rows": 64, "splits": 1},),
)  # fmt: skip


def warned():
    """What is logged as a warning within this context; something must be."""
    return TestCase().assertLogs("ao_kernels", "WARNING")


def test_a_problem_is_a_line():
    assert str(PROBLEM) == "matmul int4 128 bfloat16 None n=4096 k=1024 m<=16"


def test_buckets():
    assert [bucket(m) for m in (0, 1, 2, 3, 16, 17, 130)] == [1, 1, 2, 4, 16, 32, 256]


def test_what_is_kept_is_found(store):
    assert store.find(PROBLEM) is None
    assert store.keep(PROBLEM, RECORD) == RECORD
    assert store.find(PROBLEM) == (RECORD, "cache")
    assert store.find(PROBLEM._replace(m=32)) is None
    assert len(list(store.folder.iterdir())) == 1


def test_who_comes_second_gets_the_first(store):
    store.keep(PROBLEM, RECORD)
    assert store.keep(PROBLEM, RECORD._replace(setting={"rows": 1})) == RECORD


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"format": 1}', '{"format": 2, "device": {}, "record": {}}', "\x00",
        '{"format": 1, "device": {"name": "x", "arch": 90}, "record": {"problem": "p"}}',
        json.dumps(
            {
                "format": 1, "device": {"name": "x", "arch": 90},
                "record": {**RECORD.to_dict(), "setting": {"rows": "many"}},
            }
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_replaced(store, text):
    store.keep(PROBLEM, RECORD)
    (file,) = store.folder.iterdir()
    file.write_text(text)
    with warned() as logged:
        assert store.find(PROBLEM) is None
    assert f"{file} cannot be used, and is ignored" in logged.output[0]
    assert store.keep(PROBLEM, RECORD) == RECORD
    assert store.find(PROBLEM) == (RECORD, "cache")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(Device("Some GPU", 90), tmp_path / "file" / "cache")
    with warned() as logged:
        assert store.find(PROBLEM) is None
        assert store.keep(PROBLEM, RECORD) == RECORD
    assert "settings of kernels cannot be kept in" in logged.output[0]


def test_a_folder_that_may_only_be_read(store, monkeypatch):
    store.keep(PROBLEM, RECORD)

    def write_text(*_args, **_options):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "write_text", write_text)
    other = PROBLEM._replace(n=1)
    with warned() as logged:
        assert store.keep(other, RECORD._replace(problem=str(other))).problem == str(other)
    assert "settings of kernels cannot be kept in" in logged.output[0]
    assert store.find(PROBLEM) == (RECORD, "cache")


def test_without_links_the_file_is_written_all_the_same(store, monkeypatch):
    def link(source, target):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", link)
    assert store.keep(PROBLEM, RECORD) == RECORD
    assert store.find(PROBLEM) == (RECORD, "cache")


RACE = """
import sys, time
from pathlib import Path
from ao_kernels.triton.tuning.store import Device, Problem, Record, Store
assert "torch" not in sys.modules
folder, number, start = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
store = Store(Device("Some GPU", 90), folder)
time.sleep(max(0, start - time.time()))
for n in range(100):
    problem = Problem("matmul", ("int4",), n, 1, 1)
    print(store.keep(problem, Record(str(problem), {"process": number})).setting["process"])
"""


def test_processes_that_race_agree(tmp_path):
    start = str(time.time() + 1)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(number), start], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=120) for process in running]
    assert [error for _, error in told] == ["", ""]
    first, second = (output.split() for output, _ in told)
    assert first == second
    assert len(first) == 100
    assert len(list(tmp_path.iterdir())) == 100


def shipped(store, **changes):
    data = {
        "format": 1, "device": store.device._asdict(), "triton": "3.6.0", "kernels": "of then",
        "records": [RECORD.to_dict()],
    }  # fmt: skip
    store.shipped.mkdir()
    file = store.shipped / f"{store.device.slug}.json"
    file.write_text(json.dumps({**data, **changes}))
    return file


def test_what_is_shipped_is_found(store):
    shipped(store)
    assert store.find(PROBLEM) == (RECORD, "shipped")
    assert store.find(PROBLEM._replace(n=1)) is None
    assert store._replace(device=Device("Another GPU", 90)).find(PROBLEM) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 7}, "format=7 is not 1"),
        ({"device": {"name": "Some GPU", "arch": 80}}, "it is for"),
        ({"records": [{"problem": "x"}]}, "KeyError"),
    ],
)
def test_a_shipped_file_that_cannot_be_used(store, changes, words):
    file = shipped(store, **changes)
    with warned() as logged:
        assert store.find(PROBLEM) is None
    assert f"{file} cannot be used" in logged.output[0]
    assert words in logged.output[0]


def test_every_file_in_the_package_can_be_used():
    with TestCase().assertNoLogs("ao_kernels"):
        for file in files.SHIPPED.glob("*.json"):
            device = files._device(json.loads(file.read_text())["device"])
            assert files._shipped(files.SHIPPED, device)
            assert file.name == f"{device.slug}.json"


def test_the_cache_is_that_of_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    store = store_of(Device("NVIDIA H200 (MIG 1g)", 90), "3.6.0")
    versions = f"triton-3.6.0-{files.digest()}"
    assert store.folder == tmp_path / "triton" / "nvidia-h200-mig-1g-sm-90" / versions
    assert store_of(store.device, "3.7.0").folder != store.folder


def test_exported_and_cleared(tmp_path, monkeypatch):
    """What is exported can be shipped; records of other sources are not in it."""
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    store = store_of(Device("Some GPU", 90), "3.6.0")
    store.keep(PROBLEM, RECORD)
    other = store.folder.with_name("triton-3.6.0-0123456789abcdef")
    store._replace(folder=other).keep(PROBLEM, RECORD)
    assert [each[1] for each in files.cached()] == sorted([store.folder.name, other.name])
    ((name, data),) = files.exported().items()
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / name).write_text(json.dumps(data))
    elsewhere = Store(store.device, tmp_path / "none", tmp_path / "shipped")
    assert elsewhere.find(PROBLEM) == (RECORD, "shipped")
    assert data["triton"] == "3.6.0"
    assert files.clear() == 2
    assert (list(files.cached()), files.exported()) == ([], {})
