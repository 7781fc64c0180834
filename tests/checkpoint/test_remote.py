"""Are checkpoints behind a URL saved, loaded, read, compared and resharded like local ones, and never mixed?"""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor
from typer.testing import CliRunner, Result

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import clean, leftovers, reshard
from shardwise.checkpoint.files import OWN_LOCKS
from shardwise.checkpoint.remote import RangeCache, RemoteLock, RemotePath, is_url
from shardwise.cli.main import app

URL = "memory://runs/ckpt"
WHOLE = torch.arange(48.0).reshape(8, 6)


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own for every test; nothing stays in the folder of temporary files."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    MemoryFileSystem.store.clear()


def names(url: str = URL) -> list[str]:
    return sorted(RemotePath.parse(url).list_names())


def save_value(comm: Comm, value: float, url: str, format: str, async_op: bool) -> None:
    state = {"w": shardwise.shard(WHOLE + value, ChunkSpec(0, comm.world_size)), "b": torch.full((5,), value)}
    saving = shardwise.save(state, url, format=format, async_op=async_op)
    if saving is not None:
        saving.wait()


def load_value(comm: Comm, url: str) -> tuple[Tensor, Tensor]:
    state = {"w": shardwise.zeros(ChunkSpec(1, comm.world_size), 8, 6), "b": torch.zeros(5)}
    shardwise.load(state, url)
    return state["w"].full(), state["b"]


def check_value(url: str, value: float, ranks: int = 2) -> None:
    for whole, plain in run_local(load_value, ranks, url):
        assert torch.equal(whole, WHOLE + value) and torch.equal(plain, torch.full((5,), value))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("format", ["shardwise", "dcp", "hf"])
def test_saved_loaded_and_replaced(format: str, async_op: bool) -> None:
    for value in (1.0, 2.0):
        if format == "hf" and async_op:
            pytest.skip("whole tensors are gathered, which needs the comm")
        run_local(save_value, 3, value, URL, format, async_op)
        check_value(URL, value)
        tokens = {
            name.partition("-")[0]
            for name in names()
            if name not in ("shardwise.index.json", ".metadata", "model.safetensors.index.json")
        }
        assert len(tokens) == 1, "only the files of one save are left"
    with shardwise.open(URL) as opened:
        opened.verify()
        assert torch.equal(opened["w"][2:5, ::2], (WHOLE + 2.0)[2:5, ::2].cpu())
        assert repr(opened) == f"Checkpoint('{URL}', 2 tensors)"
    assert not Path("memory:").exists()


@pytest.mark.parametrize("first", ["shardwise", "dcp", "hf"])
@pytest.mark.parametrize("second", ["shardwise", "dcp", "hf"])
def test_a_checkpoint_of_another_format_is_replaced(first: str, second: str) -> None:
    run_local(save_value, 2, 1.0, URL, first, False)
    run_local(save_value, 2, 2.0, URL, second, False)
    check_value(URL, 2.0)
    assert len([name for name in names() if not name[:16].isalnum() or "-" not in name]) == 1, "one index is left"


def test_something_else_is_not_replaced() -> None:
    fsspec.filesystem("memory").pipe_file("/runs/ckpt/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"contains things other than a checkpoint \(notes.txt\)"):
        shardwise.save({"n": 1}, URL)
    assert names() == ["notes.txt"]


class BrokenStore(Exception):
    """What a driver may raise: a class of its own."""


@pytest.mark.parametrize("operation", ["put_file", "pipe_file"])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_save_that_fails_leaves_the_old_checkpoint_alone(
    monkeypatch: pytest.MonkeyPatch, operation: str, async_op: bool
) -> None:
    run_local(save_value, 2, 1.0, URL, "shardwise", False)
    before = names()

    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise BrokenStore("no space in the bucket")

    def body(comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            save_value(comm, 2.0, URL, "shardwise", async_op)
        return str(error.value)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, operation, fail)
        told = run_local(body, 2)
    assert all("memory://runs/ckpt/" in text and "cannot be written: BrokenStore: no space" in text for text in told)
    assert names() == before
    check_value(URL, 1.0)


def test_what_a_killed_save_left_is_removed_by_the_next() -> None:
    run_local(save_value, 2, 1.0, URL, "shardwise", False)
    store = fsspec.filesystem("memory")
    for name in ("0123456789abcdef-rank00000-00000.safetensors", "0123456789abcdef-share00000.json"):
        store.pipe_file(f"/runs/ckpt/{name}", b"half")
    check_value(URL, 1.0)
    run_local(save_value, 2, 2.0, URL, "shardwise", False)
    assert not any(name.startswith("0123456789abcdef") for name in names())


@pytest.mark.parametrize("format", ["shardwise", "dcp", "hf"])
def test_a_load_beside_a_replacing_save_is_never_mixed(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """The checkpoint is replaced at every read in turn; what is loaded is the old or the new one, whole."""
    shardwise.save({"w": WHOLE, "b": torch.zeros(5)}, URL, format=format)
    plain, count, replace_at = RemotePath.read_range, 0, 0

    def read(self: RemotePath, low: int, high: int) -> bytes:
        nonlocal count
        count += 1
        if count == replace_at:
            shardwise.save({"w": WHOLE + replace_at, "b": torch.full((5,), float(replace_at))}, URL, format=format)
        return plain(self, low, high)

    monkeypatch.setattr(RemotePath, "read_range", read)
    replaced = 0
    for replace_at in range(1, 40):
        count = 0
        state = {"w": torch.zeros(8, 6), "b": torch.zeros(5)}
        shardwise.load(state, URL)
        value = float(state["b"][0])
        assert torch.equal(state["w"], WHOLE + value) and (state["b"] == value).all(), replace_at
        assert value in (replace_at, replace_at - 1 if replaced == replace_at - 1 else replaced)
        if count < replace_at:
            break
        replaced = replace_at
    assert replaced >= 2


def test_a_file_that_is_overwritten_while_it_is_read_is_noticed() -> None:
    shardwise.save({"w": WHOLE}, "memory://runs/model", format="hf")
    store = fsspec.filesystem("memory")
    data = next(name for name in names("memory://runs/model") if name.endswith(".safetensors"))
    store.mv(f"/runs/model/{data}", "/runs/one.safetensors")
    with shardwise.open("memory://runs/one.safetensors") as opened:
        assert torch.equal(opened["w"][1], WHOLE[1].cpu())
        store.pipe_file("/runs/one.safetensors", store.cat_file("/runs/one.safetensors"))
        with pytest.raises(CheckpointError, match=r"have changed while they were read; a save has replaced"):
            opened["w"][2]


def test_a_checkpoint_that_was_replaced_says_so() -> None:
    shardwise.save({"w": WHOLE}, URL)
    with shardwise.open(URL) as opened:
        shardwise.save({"w": WHOLE + 1}, URL)
        with pytest.raises(CheckpointError, match="a save has replaced the checkpoint since: open it again"):
            opened["w"][2]


def test_reshard_from_and_to_a_url(tmp_path: Path) -> None:
    run_local(save_value, 2, 1.0, URL, "dcp", False)
    report = reshard(URL, "memory://runs/columns", layout="S(1)", ranks=3, dtype="bf16", names={"w": "model.w"})
    assert (str(report.path), report.files, report.workers) == ("memory://runs/columns", 3, 1)
    with shardwise.open("memory://runs/columns") as opened:
        opened.verify()
        assert torch.equal(opened["model.w"].read(), (WHOLE + 1).bfloat16().cpu())
    with pytest.raises(CheckpointError, match="memory://runs/columns exists; choose another name"):
        reshard(URL, "memory://runs/columns")
    with pytest.raises(CheckpointError, match="is both source and destination"):
        reshard(URL, f"{URL}/")
    with pytest.raises(CheckpointError, match="is inside the source"):
        reshard(URL, f"{URL}/inner")
    with pytest.raises(CheckpointError, match="is in the memory of this process: worker"):
        reshard(URL, tmp_path / "a", workers=2)
    reshard(URL, tmp_path / "here", format="hf")
    (tmp_path / "here" / "config.json").write_text('{"model_type": "llama"}')
    report = reshard(tmp_path / "here", "memory://runs/columns", format="hf", overwrite=True, workers=2)
    assert report.copied == ("config.json",) and len(names("memory://runs/columns")) == 3
    assert reshard("memory://runs/columns", tmp_path / "back", format="hf").copied == ("config.json",)
    assert torch.equal(shardwise.open(tmp_path / "back")["w"].read(), WHOLE.cpu() + 1)


def test_a_reshard_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shardwise.save({f"w{n}": WHOLE + n for n in range(3)}, tmp_path / "a")
    plain, uploaded = MemoryFileSystem.put_file, 0

    def fail_later(self: Any, *args: Any, **options: Any) -> None:
        nonlocal uploaded
        uploaded += 1
        if uploaded == 3:
            raise OSError(errno.EIO, "Input/output error")
        plain(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail_later)
    with pytest.raises(CheckpointError, match="Input/output error"):
        reshard(tmp_path / "a", URL, layout="S(0)", ranks=4)
    assert names() == [] and uploaded == 3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_commands_take_urls(tmp_path: Path) -> None:
    shardwise.save({"w": WHOLE, "step": 3}, URL)
    torch.save({"w": WHOLE, "step": 3}, tmp_path / "a.pt")
    fsspec.filesystem("memory").put_file(str(tmp_path / "a.pt"), "/runs/a.pt")
    assert run("diff", URL, "memory://runs/a.pt").exit_code == 0
    shown = run("inspect", URL, "--verify")
    assert shown.exit_code == 0 and "shardwise" in shown.stdout and URL in shown.stdout
    assert run("reshard", URL, str(tmp_path / "b"), "--layout", "S(0)", "--ranks", "2").exit_code == 0
    assert run("reshard", str(tmp_path / "b"), "memory://runs/c", "--json").exit_code == 0
    assert run("diff", URL, "memory://runs/c").exit_code == 0
    for arguments, message in (
        (("inspect", "memory://runs/none"), "memory://runs/none: no such checkpoint"),
        (("inspect", "memory://runs"), "memory://runs: not a checkpoint; expected a folder with"),
        (("clean", URL), "this works on local folders only"),
        (("inspect", "nope://a/b"), "nope://a/b: unknown scheme 'nope'; known are s3, gs, hf, memory"),
    ):
        failed = run(*arguments)
        assert failed.exit_code == 2 and message in failed.output and "Traceback" not in failed.output, failed.output


def test_urls_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_url("s3://bucket/ckpt") and not is_url(tmp_path) and not is_url("C:/x")
    shardwise.save({"n": 1}, f"file://{tmp_path}/c")
    assert shardwise.open(tmp_path / "c").values() == {"n": 1}
    with pytest.raises(CheckpointError, match=r"'s3:/bucket/ckpt' is a URL that was made a path.*pass it as a string"):
        shardwise.save({"n": 1}, Path("s3://bucket/ckpt"))
    for path, message in (
        ("memory://", "is not a valid checkpoint name"),
        ("memory://a::b", "URLs within URLs are not supported"),
        ("nope://a/b", "unknown scheme 'nope'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            shardwise.open(path)
    for function in (leftovers, clean):
        with pytest.raises(CheckpointError, match="this works on local folders only"):
            function(URL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "temporary"]


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for call in (
        shardwise.open,
        lambda path: shardwise.save({"n": 1}, path),
        lambda path: shardwise.load({"n": 1}, path),
    ):
        with pytest.raises(
            CheckpointError, match=r"s3:// needs a driver that is not installed .*; run: pip install s3fs"
        ):
            call("s3://bucket/ckpt")


def test_errors_of_a_driver_name_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BrokenStore("who are you?")

    shardwise.save({"n": 1}, URL)
    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(CheckpointError, match=r"memory://runs/ckpt.* cannot be read: BrokenStore: who are you\?"):
        shardwise.open(URL)


def test_ranges_are_read_in_parallel_and_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * (1 << 14)
    fsspec.filesystem("memory").pipe_file("/runs/large", data)
    place, cache = RemotePath.parse("memory://runs/large"), RangeCache(1 << 20)
    assert cache.chunk_bytes == 1 << 17
    plain, together, most = RemotePath.read_range, threading.Barrier(2), 0

    def read(self: RemotePath, low: int, high: int) -> bytes:
        nonlocal most
        if low in (0, cache.chunk_bytes) and high - low == cache.chunk_bytes:
            together.wait(60)  # each waits until the other is being read
        assert high - low <= cache.chunk_bytes
        most = max(most, len(cache._chunks))
        return plain(self, low, high)

    monkeypatch.setattr(RemotePath, "read_range", read)
    try:
        for low, high in (
            (0, 1 << 18),
            (5, 9),
            (1 << 17, (1 << 17) + 3),
            (1000, len(data)),
            (len(data) - 1, len(data)),
        ):
            assert cache.read(place, len(data), low, high).tobytes() == data[low:high]
    finally:
        cache.close()
    kept = sum(min(step, len(data)) for _, step, _ in cache._chunks)
    assert most * cache.chunk_bytes <= (1 << 20) and kept == 0


def test_a_slice_of_a_large_tensor_reads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.arange(1 << 20, dtype=torch.int32).reshape(1 << 10, 1 << 10)
    shardwise.save({"w": large}, "memory://runs/hf", format="hf")
    plain, count = RemotePath.read_range, 0

    def read(self: RemotePath, low: int, high: int) -> bytes:
        nonlocal count
        count += high - low
        return plain(self, low, high)

    monkeypatch.setattr(RemotePath, "read_range", read)
    with shardwise.open("memory://runs/hf", max_buffer_bytes=1 << 20) as opened:
        assert torch.equal(opened["w"][500:503, 7], large[500:503, 7].cpu())
    assert 0 < count < 1 << 20


OPERATIONS = ("put_file", "pipe_file", "rm", "ls", "info", "cat_file")


def save_with_failure(
    monkeypatch: pytest.MonkeyPatch, state: Any, format: str, number: int, killed: bool
) -> tuple[bool, bool]:
    """Save while operation `number` of the store fails, and if killed all after it.

    Whether the save came through, and whether there was such an operation; some drivers hide a failure.
    """
    count = 0

    def failing(plain: Any) -> Any:
        def operation(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number or (killed and count > number):
                raise BrokenStore("the connection was lost")
            return plain(self, *args, **options)

        return operation

    with monkeypatch.context() as patched:
        for name in OPERATIONS:
            patched.setattr(MemoryFileSystem, name, failing(getattr(MemoryFileSystem, name)))
        try:
            shardwise.save(state, URL, format=format)
        except CheckpointError as error:
            assert "BrokenStore" in str(error) or "FileNotFoundError" in str(error) or "still there" in str(error)
            return False, True
    return True, count >= number


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("format", ["shardwise", "hf"])
def test_whichever_operation_of_a_store_fails_there_is_one_whole_checkpoint(
    monkeypatch: pytest.MonkeyPatch, format: str, killed: bool
) -> None:
    value, failures = 0.0, 0
    shardwise.save({"w": WHOLE, "b": torch.zeros(5)}, URL, format="shardwise")
    for number in range(1, 100):
        state = {"w": WHOLE + number, "b": torch.full((5,), float(number))}
        came_through, reached = save_with_failure(monkeypatch, state, format, number, killed)
        found = {"w": torch.zeros(8, 6), "b": torch.zeros(5)}
        shardwise.load(found, URL)
        now = float(found["b"][0])
        assert torch.equal(found["w"], WHOLE + now) and (found["b"] == now).all(), f"operation {number}"
        assert now == number if came_through else now in (value, number), f"operation {number}"
        value, failures = now, failures + (not came_through)
        if not reached:
            break
    assert failures >= 5 and not reached
    shardwise.save({"w": WHOLE, "b": torch.zeros(5)}, URL)
    assert len(names()) == 2, "an index and a file: what was left is removed"


def test_two_saves_to_one_url_are_told_apart() -> None:
    shardwise.save({"w": torch.ones(2)}, URL)
    first, second = (RemoteLock(RemotePath.parse(URL), "save", digit * 16) for digit in "0f")
    second.acquire()
    for _ in range(2):  # whoever has begun goes first, whatever the tokens are
        with pytest.raises(CheckpointError, match="another save to it is running"):
            first.acquire()
    with pytest.raises(CheckpointError, match="another save to it is running"):
        shardwise.save({"w": torch.zeros(2)}, URL)
    second.release()
    shardwise.save({"w": torch.zeros(2)}, URL)
    assert shardwise.open(URL)["w"].read().tolist() == [0.0, 0.0] and len(names()) == 2
    lost = RemoteLock(RemotePath.parse(URL), "save", "a" * 16)
    lost.acquire()
    lost.let_go()  # its process was killed
    shardwise.save({"w": torch.ones(2)}, URL)
    assert len(names()) == 2


def test_of_two_that_start_at_once_one_goes_on() -> None:
    place, outcome, both = RemotePath.parse(URL), dict[str, str](), threading.Barrier(2)

    def start(token: str) -> None:
        lock = RemoteLock(place, "save", token)
        both.wait()
        try:
            lock.acquire()
            outcome[token] = "saves"
        except CheckpointError as error:
            outcome[token] = str(error)

    for number in range(20):
        tokens = [f"{number:02x}" + "0" * 14, f"{number:02x}" + "1" * 14]
        threads = [threading.Thread(target=start, args=(token,)) for token in tokens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [outcome[token] for token in tokens]
        assert found.count("saves") == 1 and any("another save to it is running" in text for text in found), found
        OWN_LOCKS[tokens[found.index("saves")]].release()
