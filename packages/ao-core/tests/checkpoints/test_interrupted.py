"""Killed at any moment, or out of disk space, the same call goes on and ends with the same bytes."""

from __future__ import annotations

import json
import os
import zlib

import pytest
import torch
from safetensors.torch import save_file

from ao_core import WeightOnlyConfig, open_checkpoint, quantize_checkpoint, verify_checkpoint
from ao_core.checkpoints import work
from ao_core.checkpoints.files import WORK
from ao_core.errors import CheckpointError, ConfigError
from ao_core.testing.warm import run_python

INT4 = WeightOnlyConfig("int4", 32, "bfloat16")
SIZE = 20_000
#: states of runs that no run leaves
STATES = (
    "", "{", "[]", "3", '{"job": 3}', "[" * 100_000, '{"job": {}, "job": {}}', '{"job": {"a": NaN}}',
    '{"job": {}, "shards": [], "report": 3, "names": null}',
    '{"job": {}, "shards": null, "report": "", "names": ["model.safetensors"]}',
)  # fmt: skip

# Runs in forked children, each of which is killed before one of the calls that touch the disk, or in the
# middle of one that writes; then in one more that is killed later; then until it is done. Prints the moment,
# whether it was killed, what could be opened then, and whether the bytes are those of a run in peace.
KILLED = """
import hashlib, json, os, pathlib, random, shutil, signal, sys, zlib
import torch
from ao_core import WeightOnlyConfig, open_checkpoint, quantize_checkpoint
from ao_core.checkpoints import pieces
from ao_core.errors import CheckpointError

torch.set_num_threads(1)
os.fsync = lambda file: None  # what a kill leaves does not depend on it
pieces.SIZE = 30_000
source, root, old = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "old"
CONFIGS = [WeightOnlyConfig("int4", 32, "bfloat16"), WeightOnlyConfig("int8")]
CALLS = [(zlib, "crc32"), (os, "fsync"), (os, "replace"), (os, "open"), (os, "close"), (shutil, "copyfile"),
         (shutil, "rmtree"), (pathlib.Path, "unlink"), (pathlib.Path, "mkdir"), (pathlib.Path, "rmdir")]
left = [10**9]

def step():
    left[0] -= 1
    return left[0] < 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def counted(function):
    def run(*args, **kwargs):
        if step():
            die()
        return function(*args, **kwargs)
    return run

class Torn:
    "A file that is being written when the process is killed."
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()
    def __getattr__(self, name):
        return getattr(self.file, name)
    def write(self, data):
        if step():
            data = bytes(data)
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            die()
        self.file.write(data)

real_open = pathlib.Path.open
def torn_open(self, mode="r", *args, **kwargs):
    file = real_open(self, mode, *args, **kwargs)
    return Torn(file) if mode == "xb" else file

def child(target, moment):
    "Quantize in another process, which is killed at that moment; whether it was."
    pid = os.fork()
    if pid == 0:
        for owner, name in CALLS:
            setattr(owner, name, counted(getattr(owner, name)))
        pathlib.Path.open = torn_open
        left[0] = moment
        quantize_checkpoint(source, target, CONFIGS[0], max_shard_size=20_000, overwrite=old)
        (root / "calls").write_text(str(moment - left[0]))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)

def tree(target):
    # a lock of the work alone is left by a kill after the last word; the next run takes it away
    found = sorted(p for p in target.rglob("*") if p.is_file() and p.name != "lock")
    found = [p for p in found if not p.name.startswith("ao_report")]
    return {str(p.relative_to(target)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}

def fresh(name):
    target = root / name
    if old:
        quantize_checkpoint(source, target, CONFIGS[1], max_shard_size=20_000)
    return target

def what(target):
    try:
        return open_checkpoint(target).entries["layers.0.q_proj.weight"].spec.dtype
    except CheckpointError:
        return "none"

def finished(target):
    manifest = target / "ao_manifest.json"
    if (target / ".quantizing" / "state.json").exists() or not manifest.exists():
        return False
    return json.loads(manifest.read_text())["config"]["args"]["dtype"] == "int4"

peace = fresh("peace")
quantize_checkpoint(source, peace, CONFIGS[0], max_shard_size=20_000, overwrite=old)
assert not child(fresh("counted"), 10**9)
expected, calls = tree(peace), int((root / "calls").read_text())
count = int(sys.argv[4])
for number in range(count):
    rng = random.Random(number)
    target = fresh(f"killed-{number}")
    # the first ones spread over the whole of the work, its last words too
    moments = [int(calls * (number + rng.random()) / count), rng.randrange(calls), 10**9]
    seen, killed = [], []
    for moment in moments:
        if not finished(target):
            killed.append(child(target, moment))
            seen.append(what(target))
    print(json.dumps([moments[0], calls, killed, seen, tree(target) == expected]))
    shutil.rmtree(target)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks to be killed")
@pytest.mark.parametrize("before", ["nothing", "old"])
def test_killed_at_10_moments(source, tmp_path, before):
    (tmp_path / "runs").mkdir()
    done = run_python("-c", KILLED, source, tmp_path / "runs", before, 10)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 10
    first = "int8" if before == "old" else "none"
    for moment, _, killed, seen, same in runs:
        assert same, moment
        assert killed[0]
        assert not killed[-1] or len(killed) < 3  # it had finished all but its last words
        # the old checkpoint, whole, up to some moment, and the new one from then on
        assert seen == sorted(seen, key=[first, "int4"].index)
        assert seen[-1] == "int4"
    moments = [moment / calls for moment, calls, *_ in runs]
    assert min(moments) < 0.2
    assert max(moments) > 0.8
    assert {seen[0] for *_, seen, _ in runs} == {first, "int4"}
    assert any(killed == [True, True, False] for _, _, killed, _, _ in runs)


@pytest.mark.parametrize("step", [0, 1, 4, 9, 14, 18, 22, 26])
@pytest.mark.usefixtures("small_pieces")
def test_a_full_disk(source, tmp_path, full_disk, files, step):
    quantize_checkpoint(source, tmp_path / "peace", INT4, max_shard_size=SIZE)
    target = tmp_path / "out"
    with (
        full_disk(step, "fsync") as disk,
        pytest.raises(CheckpointError, match="could not write: No space left on device"),
    ):
        quantize_checkpoint(source, target, INT4, max_shard_size=SIZE)
    assert disk.calls == step + 1
    before = sorted(path.name for path in target.glob(f"{WORK}/piece-*"))
    quantize_checkpoint(source, target, INT4, max_shard_size=SIZE)
    assert files(target) == files(tmp_path / "peace")
    assert len(before) > 2 or step < 9 or step > 14
    assert not (target / WORK).exists()


@pytest.mark.usefixtures("small_pieces")
class TestResuming:
    @pytest.fixture
    def unfinished(self, source, tmp_path):
        """A run that was interrupted in the middle."""

        def stop(done, total, name):
            if done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, tmp_path / "out", INT4, progress=stop)
        return tmp_path / "out"

    @pytest.fixture
    def late(self, source, tmp_path, monkeypatch):
        """A run that was interrupted when the first of its files was where it belongs."""
        target, real = tmp_path / "late", os.replace

        def stop(old, new):
            real(old, new)
            if str(new).startswith(f"{target}/model-00001-of-"):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                quantize_checkpoint(source, target, INT4, max_shard_size=SIZE)
        return target

    def test_it_goes_on_where_it_was(self, source, unfinished):
        with pytest.raises(CheckpointError, match="an unfinished run"):
            verify_checkpoint(unfinished)
        with pytest.raises(CheckpointError):
            open_checkpoint(unfinished)
        calls = []
        quantize_checkpoint(source, unfinished, INT4, progress=lambda *call: calls.append(call))
        assert calls[0][0] > 0.3 * calls[0][1]
        tensors = set(open_checkpoint(source).entries)
        assert 0 < len(tensors & {name for _, _, name in calls}) < 0.7 * len(tensors)
        assert not any(file.problem for file in verify_checkpoint(unfinished))

    def test_another_run_is_refused(self, source, unfinished, tmp_path):
        other = WeightOnlyConfig("int8")
        with pytest.raises(ConfigError, match="unfinished run with another config;"):
            quantize_checkpoint(source, unfinished, other)
        with pytest.raises(ConfigError, match="another exclude and max_shard_size;"):
            quantize_checkpoint(source, unfinished, INT4, exclude=["conv"], max_shard_size=SIZE)
        os.utime(min(source.glob("*.safetensors")), ns=(1, 1))
        with pytest.raises(ConfigError, match="another source;"):
            quantize_checkpoint(source, unfinished, INT4)
        quantize_checkpoint(source, unfinished, other, overwrite=True)
        assert not (unfinished / WORK).exists()
        entry = open_checkpoint(unfinished).entries["layers.0.q_proj.weight"]
        assert entry.spec.dtype == "int8"

    @pytest.mark.parametrize(
        "how", ["flipped", "cut", "emptied", "pipe", "other", "no report", "a format"]
    )
    def test_a_damaged_piece_is_made_again(self, source, unfinished, tmp_path, files, how):
        pieces = sorted((unfinished / WORK).glob("piece-*"))
        piece, data = pieces[1], bytearray(pieces[1].read_bytes())
        if how == "flipped":
            data[-3] ^= 1
        piece.unlink()
        if how == "pipe":
            os.mkfifo(piece)
        elif how == "other":
            piece.write_bytes(pieces[0].read_bytes())
        elif how == "a format":  # that nobody knows, under a right checksum
            table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            body, metadata = data[8 + int.from_bytes(data[:8], "little") :], table["__metadata__"]
            metadata["ao"] = metadata["ao"].replace('"dtype":"int4"', '"dtype":"int?"')
            metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
            header = json.dumps(table).encode()
            piece.write_bytes(len(header).to_bytes(8, "little") + header + body)
        elif how == "no report":
            save_file({"x": torch.ones(2)}, piece)
        else:
            piece.write_bytes(data[: {"flipped": len(data), "cut": len(data) // 2}.get(how, 0)])
        quantize_checkpoint(source, unfinished, INT4)
        quantize_checkpoint(source, tmp_path / "peace", INT4)
        assert files(unfinished) == files(tmp_path / "peace")

    def test_a_damaged_file_is_made_again(self, source, tmp_path, files, monkeypatch):
        """Of the files that are complete, each has its hash in the state of the run."""
        target, count = tmp_path / "out", 0
        real = os.replace

        def stop(old, new):
            nonlocal count
            count += str(new).endswith("state.json")
            if count > 4:  # two files are written
                raise KeyboardInterrupt
            real(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                quantize_checkpoint(source, target, INT4, max_shard_size=SIZE)
        file = target / WORK / "0"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        quantize_checkpoint(source, target, INT4, max_shard_size=SIZE)
        quantize_checkpoint(source, tmp_path / "peace", INT4, max_shard_size=SIZE)
        assert files(target) == files(tmp_path / "peace")

    def test_two_at_once(self, source, tmp_path):
        def second(done, total, name):
            with pytest.raises(ConfigError, match="another process is writing there now"):
                quantize_checkpoint(source, tmp_path / "out", INT4)

        quantize_checkpoint(source, tmp_path / "out", INT4, progress=second)
        assert not any(file.problem for file in verify_checkpoint(tmp_path / "out"))

    @pytest.mark.parametrize("text", STATES, ids=lambda text: str(text)[:40])
    def test_a_state_that_cannot_be_read(self, source, unfinished, tmp_path, files, text):
        """Of no use to anybody: the run begins anew."""
        (unfinished / WORK / "state.json").write_text(text)
        quantize_checkpoint(source, unfinished, INT4)
        quantize_checkpoint(source, tmp_path / "peace", INT4)
        assert files(unfinished) == files(tmp_path / "peace")
        assert not (unfinished / WORK).exists()

    def test_such_a_state_in_a_directory_with_files(self, source, unfinished):
        (unfinished / WORK / "state.json").write_text("{")
        (unfinished / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"is not empty \(it has notes\.txt\)"):
            quantize_checkpoint(source, unfinished, INT4)
        quantize_checkpoint(source, unfinished, INT4, overwrite=True)
        assert (unfinished / "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize(
        "names",
        [["../../evil"], ["/evil"], ["evil"], ["model.safetensors", "model.safetensors"], []],
        ids=str,
    )
    def test_names_of_a_state_lead_nowhere(self, source, late, tmp_path, files, names):
        path = late / WORK / "state.json"
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"names": names}))
        quantize_checkpoint(source, late, INT4, max_shard_size=SIZE, overwrite=True)
        assert not any(file.problem for file in verify_checkpoint(late))
        assert not list(tmp_path.rglob("*evil*"))

    @pytest.mark.parametrize("gone", [True, False], ids=["gone", "changed"])
    def test_files_that_are_damaged_when_they_have_names(self, source, late, tmp_path, files, gone):
        state = json.loads((late / WORK / "state.json").read_text())
        for place in (late / state["names"][0], late / WORK / "1"):
            assert place.exists()
            if gone:
                place.unlink()
            else:
                place.write_bytes(b"x" * 100)
        quantize_checkpoint(source, late, INT4, max_shard_size=SIZE)
        quantize_checkpoint(source, tmp_path / "peace", INT4, max_shard_size=SIZE)
        assert files(late) == files(tmp_path / "peace")

    @pytest.mark.parametrize("name", ["lock", "state.json", "0", "model.safetensors.index.json"])
    def test_things_in_the_work_that_no_run_leaves(self, source, unfinished, name):
        path = unfinished / WORK / name
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "x").write_text("")
        quantize_checkpoint(source, unfinished, INT4, max_shard_size=SIZE, overwrite=True)
        assert not any(file.problem for file in verify_checkpoint(unfinished))

    def test_work_that_is_a_link(self, source, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("")
        (tmp_path / "out" / WORK).symlink_to(tmp_path / "other")
        with pytest.raises(ConfigError, match="is there and is not a directory; remove it"):
            quantize_checkpoint(source, tmp_path / "out", INT4, overwrite=True)
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]

    @pytest.mark.parametrize("locked", [True, False])
    def test_killed_before_its_last_word(self, source, tmp_path, locked):
        """A directory of work that is empty but for a lock: the next call removes it."""
        quantize_checkpoint(source, tmp_path / "out", INT4)
        (tmp_path / "out" / WORK).mkdir()
        if locked:
            (tmp_path / "out" / WORK / "lock").write_bytes(b"")
        with pytest.raises(ConfigError, match=r"ao_manifest\.json is there: a run is done"):
            quantize_checkpoint(source, tmp_path / "out", INT4)
        assert not (tmp_path / "out" / WORK).exists()
        assert not any(file.problem for file in verify_checkpoint(tmp_path / "out"))

    def test_the_lock_comes_first(self, source, tmp_path, monkeypatch):
        """What is in DST is looked at when no other run can change it: a finished one is not done again."""
        real, calls = work.check_empty, []

        def finish_first(target):
            calls.append(target)
            real(target)

        monkeypatch.setattr(work, "check_empty", finish_first)
        quantize_checkpoint(source, tmp_path / "out", INT4, progress=lambda *call: calls)
        with pytest.raises(ConfigError, match="is not empty"):
            quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
        assert len(calls) == 2
        assert (
            open_checkpoint(tmp_path / "out").entries["layers.0.q_proj.weight"].spec.dtype == "int4"
        )
