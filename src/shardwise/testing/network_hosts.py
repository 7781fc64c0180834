"""Several hosts on one machine: network namespaces joined by a link of limited bandwidth (Linux, root).

To shardwise, ranks in different network namespaces are on different hosts: they do not read each other's memory, and
all bytes between them pass the link, where they are counted. Nothing is seen from outside of the namespaces, so that
several of these networks may exist at a time.

    with NetworkHosts(megabits=200) as hosts, HostsWorld(hosts, 4) as world:
        world.run(fn)
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shardwise._torch import TCPStore
from shardwise.comm.launch import LocalWorld, host_store

T = TypeVar("T")
DEVICE = "eth0"
_PREFIX = "shardwise"
_CLONE_NEWNET = 0x40000000
_numbers = count()


class NetworkHosts:
    """Two network namespaces and the link between them; a `with` block makes and removes them."""

    def __init__(self, *, megabits: int) -> None:
        self.names = tuple(f"{_PREFIX}-{os.getpid()}-{next(_numbers)}" for _ in range(2))
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self.bytes_per_second = megabits * 1e6 / 8
        self._rate = f"{megabits}mbit"

    def __enter__(self) -> NetworkHosts:
        ours = [name for name in _list_namespaces() if name.startswith(f"{_PREFIX}-")]
        _remove_namespaces([name for name in ours if not Path(f"/proc/{name.split('-')[1]}").exists()])
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _make(self) -> None:
        for name in self.names:
            _run_ip("netns", "add", name)
        first, second = self.names
        _run_ip("link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _run_ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _run_ip("-n", name, "link", "set", device, "up")
            limits = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms")
            _run_command("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limits)

    def remove(self) -> None:
        """Remove the namespaces, and the link with them."""
        _remove_namespaces(name for name in self.names if name in _list_namespaces())

    def bytes_sent(self) -> tuple[int, ...]:
        """The bytes that each host has sent over the link since it was made, headers included."""
        counted = [json.loads(_run_ip("-n", name, "-j", "-s", "link", "show", "dev", DEVICE)) for name in self.names]
        return tuple(int(each[0]["stats64"]["tx"]["bytes"]) for each in counted)

    def command(self, host: int, *words: str) -> list[str]:
        """The command line that runs a command on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], "env", f"GLOO_SOCKET_IFNAME={DEVICE}", *words]

    def call(self, host: int, fn: Callable[[], T]) -> T:
        """Call a function in a thread of this process that is on one of the hosts: its sockets are there."""

        def call() -> T:
            enter_namespace(self.names[host])
            return fn()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()


class JoinHost:
    """What a rank does before it joins the world: it goes to the host with its name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def __call__(self, rank: int) -> None:
        enter_namespace(self._names[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


class HostsWorld(LocalWorld):
    """A world of spawned gloo ranks, half of them on each host; the store is on the first host."""

    def __init__(self, hosts: NetworkHosts, nprocs: int = 4, *, timeout: float = 60.0) -> None:
        super().__init__(nprocs, timeout=timeout)
        self._hosts, self._address = hosts, hosts.addresses[0]
        self._prepare = JoinHost([hosts.names[2 * rank // nprocs] for rank in range(nprocs)])

    def _open_store(self) -> TCPStore:
        return self._hosts.call(0, lambda: host_store(self._address))


def why_no_network_hosts() -> str | None:
    """Why this system does not let us make namespaces with limited links; None if it does."""
    try:
        with NetworkHosts(megabits=100):
            return None
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"


def enter_namespace(name: str) -> None:
    """Take this thread, and threads and processes that it starts, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{name}").open() as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the network namespace {name}: {os.strerror(code)}")


def _list_namespaces() -> list[str]:
    return [line.split()[0] for line in _run_ip("netns", "list").splitlines() if line.strip()]


def _remove_namespaces(names: Any) -> None:
    for name in list(names):
        _run_ip("netns", "delete", name)


def _run_ip(*words: str) -> str:
    return _run_command("ip", *words)


def _run_command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
