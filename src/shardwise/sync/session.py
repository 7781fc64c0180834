"""How do two worlds meet that were started apart? A listener, a token both know, and sealed messages.

1. The publisher listens at an address; each of its ranks has a listener of its own for data. Clients come at any time.
2. The listener sends a nonce, the client answers with an HMAC over both nonces and all that it says about itself, and
   the listener proves the same the other way. Nothing else of a client is read before, a client has 5 seconds for it,
   and 64 of them may try at a time.
3. After that every message is canonical JSON with a counter and 16 bytes of HMAC under a key of this connection, and
   has a limit on its length. Nothing is unpickled. Nothing is encrypted.
4. Every wait has a deadline.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from shardwise._text import package_logger
from shardwise.comm.transports.links import closed_if_raised

PROTOCOL = 1
TOKEN_VARIABLE = "SHARDWISE_SYNC_TOKEN"  # the name of a variable
HANDSHAKE_SECONDS = 5.0
MAX_DESCRIPTION = 64 << 20
MAX_CONTROL = 4096
_MAX_HELLO = 1024
_MAX_CLIENTS = 64
_MAC_BYTES = 16
_PAUSE_SECONDS = 0.1
_HEADER = struct.Struct(f"<IQ{_MAC_BYTES}s")
_LENGTH = struct.Struct("<I")
_log = package_logger(__name__)
Message: TypeAlias = dict[str, Any]


class SyncError(RuntimeError):
    """Weights could not be passed between two worlds; the text names the world and the rank.

    >>> raise SyncError("subscriber 'server' rank 0: no publisher at tcp://127.0.0.1:29600 within 30 s")
    Traceback (most recent call last):
    ...
    shardwise.sync.session.SyncError: subscriber 'server' rank 0: no publisher at tcp://127.0.0.1:29600 within 30 s
    """


class RefusedError(SyncError):
    """The other side does not accept this one, or the two do not fit: trying again does not help.

    >>> issubclass(RefusedError, SyncError)
    True
    """


def parse_address(address: str) -> tuple[str, int]:
    """The host and port of an address; without a host it is this machine's loopback.

    >>> parse_address("tcp://127.0.0.1:29600"), parse_address("tcp://:0")
    (('127.0.0.1', 29600), ('127.0.0.1', 0))
    """
    scheme, _, rest = str(address).partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is tcp://host:port, as tcp://127.0.0.1:29600; got {address!r}")
    return (host.strip("[]") or "127.0.0.1"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host name."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def find_token(token: str | bytes | os.PathLike[str] | None, host: str) -> bytes | None:
    """The secret that is given: as text, in a file, or by the variable; None where there is none."""
    given: str | bytes | None
    names_file = isinstance(token, os.PathLike) or (
        isinstance(token, str) and os.sep in token and os.path.isfile(token)
    )
    given = Path(token).read_text().strip() if names_file else token  # type: ignore[arg-type,assignment]  # as it says
    given = given if given is not None else os.environ.get(TOKEN_VARIABLE) or None
    if given is None:
        if not is_loopback(host):
            raise ValueError(
                f"{host} is reached from other machines, so a token is needed: pass token= (a text or the path of a "
                f"file) or set {TOKEN_VARIABLE} on both sides; without one use a loopback address"
            )
        return None
    secret = given.encode() if isinstance(given, str) else given
    if len(secret) < 8:
        raise ValueError("a token has at least 8 bytes; secrets.token_hex(16) makes a good one")
    return secret


def _token_path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"shardwise-sync-{os.getuid()}" / f"{port}.token"


def write_token(port: int) -> tuple[bytes, Path]:
    """A random token in a file that only this user reads, for subscribers of the same user and machine."""
    path, token = _token_path(port), secrets.token_hex(16)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _check_private(path.parent)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    new.replace(path)
    return token.encode(), path


def read_token(port: int) -> bytes:
    """The token that a publisher of this user has written; an OSError if there is none."""
    path = _token_path(port)
    _check_private(path.parent)
    return path.read_bytes()


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can enter; remove it or pass token=")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer within the time limit")
    return left


def _receive_exactly(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while len(view):
        connection.settimeout(_left(deadline))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side closed the connection")
        view = view[count:]


def _send_all(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while len(view):
        connection.settimeout(_left(deadline))
        view = view[connection.send(view) :]


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode()


def _decode(body: bytes | bytearray) -> Message:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"the other side sent no JSON: {type(error).__name__}") from error
    if not isinstance(found, dict):
        raise ConnectionError("the other side sent no JSON object")
    return found


def _send_open(connection: socket.socket, message: Mapping[str, Any], deadline: float) -> None:
    body = _encode(message)
    _send_all(connection, memoryview(_LENGTH.pack(len(body)) + body), deadline)


def _receive_open(connection: socket.socket, limit: int, deadline: float) -> Message:
    header = bytearray(_LENGTH.size)
    _receive_exactly(connection, memoryview(header), deadline)
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise ConnectionError(f"the other side sent {length} bytes where at most {limit} are expected")
    body = bytearray(length)
    _receive_exactly(connection, memoryview(body), deadline)
    return _decode(body)


def _sign(key: bytes, *parts: bytes) -> bytes:
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        found.update(_LENGTH.pack(len(part)) + part)
    return found.digest()


class Channel:
    """A connection whose ends have proved that they know the token; its messages are counted and sealed."""

    def __init__(self, connection: socket.socket, key: bytes, *, server: bool, peer: Message) -> None:
        self._socket, self.peer = connection, peer
        ours, theirs = (b"server", b"client") if server else (b"client", b"server")
        self._keys = _sign(key, ours), _sign(key, theirs)
        self._sent, self._received = 0, 0
        self._sending = threading.Lock()
        weakref.finalize(self, connection.close)  # of a link that nobody closed
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def is_local(self) -> bool:
        """Whether the other end is a process of this host that can be handed descriptors."""
        return self._socket.family == socket.AF_UNIX

    @property
    def address(self) -> str:
        """The address of this machine by which the two ends have met."""
        return "127.0.0.1" if self.is_local else str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Send a message before a time of the monotonic clock."""
        body = _encode(message)
        with self._sending:
            mac = _sign(self._keys[0], self._sent.to_bytes(8, "little"), body)[:_MAC_BYTES]
            header = _HEADER.pack(len(body), self._sent, mac)
            self._sent += 1
            _send_all(self._socket, memoryview(header + body), deadline)

    def receive(self, deadline: float, limit: int = MAX_CONTROL) -> Message:
        """The next message; longer ones than `limit` bytes, and those of anyone else, end the connection."""
        header = bytearray(_HEADER.size)
        _receive_exactly(self._socket, memoryview(header), deadline)
        length, number, mac = _HEADER.unpack(header)
        if length > limit or number != self._received:
            raise ConnectionError(f"a message of {length} bytes with number {number}; expected {self._received}")
        body = bytearray(length)
        _receive_exactly(self._socket, memoryview(body), deadline)
        wanted = _sign(self._keys[1], number.to_bytes(8, "little"), bytes(body))[:_MAC_BYTES]
        if not hmac.compare_digest(mac, wanted):
            raise ConnectionError("a message is not sealed with the key of this connection")
        self._received += 1
        return _decode(body)

    def send_raw(self, data: memoryview, deadline: float) -> None:
        """Send bytes that a message before them has announced."""
        _send_all(self._socket, data, deadline)

    def receive_raw(self, view: memoryview, deadline: float) -> None:
        """Receive bytes that a message before them has announced."""
        _receive_exactly(self._socket, view, deadline)

    def send_descriptors(self, descriptors: Sequence[int], deadline: float) -> None:
        """Hand open files to the process at the other end."""
        self._socket.settimeout(_left(deadline))
        socket.send_fds(self._socket, [b"d"], list(descriptors))

    def receive_descriptors(self, count: int, deadline: float) -> list[int]:
        """The open files that the other end hands over."""
        self._socket.settimeout(_left(deadline))
        data, found, _, _ = socket.recv_fds(self._socket, 1, count)
        if data != b"d" or len(found) != count:
            for descriptor in found:
                os.close(descriptor)
            raise ConnectionError(f"{len(found)} of {count} descriptors arrived")
        return found

    def close(self) -> None:
        """End the connection, also for a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _mac(token: bytes, side: bytes, nonces: Sequence[str], hello: Mapping[str, Any]) -> str:
    return _sign(token, side, *(nonce.encode() for nonce in nonces), _encode(hello)).hex()


def connect(
    place: tuple[str, int] | str,
    token: bytes,
    hello: Mapping[str, Any],
    deadline: float,
    seconds: float = HANDSHAKE_SECONDS,
) -> Channel:
    """Connect to a listener (a host and port, or the name of a local one) and prove the token both ways."""
    limit = min(deadline, time.monotonic() + seconds)
    if isinstance(place, str):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closed_if_raised({0: connection}):
            connection.settimeout(_left(limit))
            connection.connect("\0" + place)
    else:
        connection = socket.create_connection(place, timeout=_left(limit))
    with closed_if_raised({0: connection}):
        challenge = _receive_open(connection, 256, limit)
        if challenge.get("shardwise.sync") != PROTOCOL or not isinstance(challenge.get("nonce"), str):
            raise RefusedError(f"what listens there is not a publisher of this version (protocol {PROTOCOL})")
        nonces = [challenge["nonce"], secrets.token_hex(16)]
        said = {**hello, "nonce": nonces[1]}
        _send_open(connection, {**said, "mac": _mac(token, b"client", nonces, said)}, limit)
        welcome = _receive_open(connection, _MAX_HELLO, limit)
        if "refused" in welcome:
            raise RefusedError(str(welcome["refused"])[:200])
        proof = str(welcome.pop("mac", ""))
        if not hmac.compare_digest(proof, _mac(token, b"server", nonces, {**said, **welcome})):
            raise RefusedError("the listener does not know the token; nothing was sent to it")
        return Channel(connection, _sign(token, *(n.encode() for n in nonces)), server=False, peer=welcome)


class SyncListener:
    """Where clients connect: a port, and with `local` a name that processes of this host connect to as well.

    `serve(channel)` runs in a thread of its own for each client that has proved the token; `channel.peer` is what the
    client said about itself.
    """

    def __init__(
        self,
        place: tuple[str, int],
        token: bytes,
        welcome: Mapping[str, Any],
        serve: Callable[[Channel], None],
        *,
        local: bool = False,
    ) -> None:
        self._token, self._welcome, self._serve = token, dict(welcome), serve
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening = [listening]
        with closed_if_raised({0: listening}):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(256)
        self.port: int = listening.getsockname()[1]
        self.name: str | None = None
        if local and hasattr(os, "memfd_create"):
            self.name = f"shardwise-sync-{secrets.token_hex(16)}"
            near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            near.bind("\0" + self.name)
            near.listen(256)
            self._listening.append(near)
        for each in self._listening:
            each.setblocking(False)  # a client that is gone before it is accepted is not waited for
        self._open: set[Channel] = set()
        self._serving: set[threading.Thread] = set()
        self._guard = threading.Lock()
        self._closed, self._process = False, os.getpid()
        self._room = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._wake, self._woken = os.pipe()
        self._accepting = threading.Thread(target=self._accept, name="shardwise-sync", daemon=True)
        self._accepting.start()
        _listeners.add(self)

    def _accept(self) -> None:
        poll = select.poll()
        by_number = {s.fileno(): s for s in self._listening}
        for number in (*by_number, self._wake):
            poll.register(number, select.POLLIN)
        while not self._closed:
            for number, _ in poll.poll():
                if number == self._wake:
                    continue
                try:
                    guest, _ = by_number[number].accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    _log.warning("a client cannot be accepted: %s", error)
                    time.sleep(_PAUSE_SECONDS)  # no descriptor is left: it stays in the queue
                    continue
                if not self._room.acquire(blocking=False):
                    guest.close()
                    continue
                serving = threading.Thread(
                    target=self._welcome_guest, args=(guest,), name="shardwise-sync", daemon=True
                )
                with self._guard:
                    self._serving.add(serving)
                try:
                    serving.start()
                except RuntimeError as error:
                    _log.warning("a client cannot be served: %s", error)
                    self._room.release()
                    guest.close()
        for each in self._listening:
            each.close()
        os.close(self._wake)
        os.close(self._woken)

    def _welcome_guest(self, guest: socket.socket) -> None:
        try:
            self._serve_guest(guest)
        finally:
            with self._guard:
                self._serving.discard(threading.current_thread())

    def _serve_guest(self, guest: socket.socket) -> None:
        try:
            try:
                channel = self._shake_hands(guest)
            finally:
                self._room.release()
        except (OSError, ValueError) as error:
            _log.info("a client was turned away: %s", error)
            guest.close()
            return
        with self._guard:
            if self._closed:
                channel.close()
                return
            self._open.add(channel)
        try:
            self._serve(channel)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            _log.info("a connection of %s ended: %s", channel.peer.get("world"), error)
        finally:
            channel.close()
            with self._guard:
                self._open.discard(channel)

    def _shake_hands(self, guest: socket.socket) -> Channel:
        limit = time.monotonic() + HANDSHAKE_SECONDS
        nonce = secrets.token_hex(16)
        _send_open(guest, {"shardwise.sync": PROTOCOL, "nonce": nonce}, limit)
        hello = _receive_open(guest, _MAX_HELLO, limit)
        proof = hello.pop("mac", None)
        nonces = [nonce, str(hello.get("nonce"))]
        known = isinstance(proof, str) and hmac.compare_digest(
            proof.encode(), _mac(self._token, b"client", nonces, hello).encode()
        )
        if not known:
            _send_open(
                guest, {"refused": "the token is not that of the publisher; pass the same token= on both sides"}, limit
            )
            raise ConnectionError("it does not know the token")
        mac = _mac(self._token, b"server", nonces, {**hello, **self._welcome})
        _send_open(guest, {**self._welcome, "mac": mac}, limit)
        return Channel(guest, _sign(self._token, *(n.encode() for n in nonces)), server=True, peer=hello)

    @property
    def is_inherited(self) -> bool:
        """Whether it was made by the process that this one was forked from."""
        return self._process != os.getpid()

    def close(self) -> None:
        """Stop listening and end all connections, and wait a little for the threads that serve them."""
        if self.is_inherited:
            return  # the sockets, and what wakes the thread, are those of the process that this one was forked from
        with self._guard:
            if self._closed:
                return
            self._closed = True
            ending = list(self._open)
        until = time.monotonic() + HANDSHAKE_SECONDS
        os.write(self._woken, b"x")
        self._accepting.join(HANDSHAKE_SECONDS)  # the address is free when this returns
        for channel in ending:
            channel.close()
        with self._guard:
            serving = [each for each in self._serving if each.is_alive()]
        for thread in serving:
            thread.join(max(0.0, until - time.monotonic()))


_listeners: weakref.WeakSet[SyncListener] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No thread may be within torch when Python ends: that would abort the program."""
    for listener in list(_listeners):
        listener.close()
