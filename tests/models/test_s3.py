"""Do checkpoints live in an object store, also with worker processes, and is a replaced one never mixed?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import reshard
from shardwise.checkpoint.remote import RemotePath

pytest.importorskip("s3fs", reason="s3fs is not installed; see the extra 'remote-tests'")
server_module = pytest.importorskip("moto.server", reason="moto is not installed; see the extra 'remote-tests'")
pytestmark = pytest.mark.filterwarnings("default")
WHOLE = torch.arange(3 << 17, dtype=torch.int32).reshape(3 << 7, 1 << 10)  # 1.5 MiB: a dozen chunks


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an object server that runs in this process; the drivers find it by the usual variables."""
    with pytest.MonkeyPatch.context() as patched:
        server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patched.setenv(name, value)
        RemotePath.parse("s3://runs/any").fs.mkdir("runs")
        yield "s3://runs"
        server.stop()


def save_value(comm: Comm, url: str, value: int, async_op: bool, format: str) -> None:
    state = {"w": shardwise.shard(WHOLE + value, ChunkSpec(0, comm.world_size)), "b": torch.full((5,), value)}
    saving = shardwise.save(state, url, async_op=async_op, format=format)
    if saving is not None:
        saving.wait()


def load_value(comm: Comm, url: str) -> int:
    state = {
        "w": shardwise.zeros(ChunkSpec(1, comm.world_size), *WHOLE.shape, dtype=torch.int32),
        "b": torch.zeros(5, dtype=torch.int64),
    }
    shardwise.load(state, url, max_buffer_bytes=1 << 20)
    value = int(state["b"][0])
    assert torch.equal(state["w"].full(), WHOLE + value) and (state["b"] == value).all()
    return value


@pytest.mark.parametrize(
    ("format", "async_op"), [("shardwise", False), ("shardwise", True), ("dcp", False), ("hf", False)]
)
def test_saved_replaced_and_loaded(bucket: str, format: str, async_op: bool) -> None:
    url = f"{bucket}/{format}-{async_op}"
    for value in (1, 2):
        run_local(save_value, 2, url, value, async_op, format)
        assert run_local(load_value, 2, url) == [value, value]
    with shardwise.open(url) as opened:
        assert torch.equal(opened["w"][100:103, 5:7], WHOLE[100:103, 5:7] + 2)
    assert len(RemotePath.parse(url).list_names()) <= 3, "the files of the first save are gone"


def test_resharded_by_processes(bucket: str, tmp_path: Path) -> None:
    run_local(save_value, 2, f"{bucket}/source", 1, False, "shardwise")
    report = reshard(
        f"{bucket}/source", f"{bucket}/columns", layout="S(1)", ranks=2, workers=2, max_buffer_bytes=512 << 20
    )
    assert report.workers == 2
    reshard(f"{bucket}/columns", tmp_path / "back")
    assert torch.equal(shardwise.open(tmp_path / "back")["w"].read(), WHOLE + 1)


def test_a_load_beside_a_replacing_save_is_never_mixed(bucket: str) -> None:
    url = f"{bucket}/replaced"
    run_local(save_value, 1, url, 0, False, "shardwise")
    for value in range(1, 6):
        saver = threading.Thread(target=run_local, args=(save_value, 1, url, value, False, "shardwise"))
        saver.start()
        try:
            one, other = run_local(load_value, 2, url)
        finally:
            saver.join()
        assert one == other and one in (value - 1, value)


def test_what_is_not_there_is_told(bucket: str) -> None:
    for url in (f"{bucket}/none", "s3://no-such-bucket/ckpt"):
        with pytest.raises(CheckpointError, match=f"{url}: "):
            shardwise.open(url)
