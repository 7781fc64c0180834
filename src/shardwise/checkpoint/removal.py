"""Removing what a save has replaced, while the program goes on: freeing gigabytes takes a while.

A program that ends waits for it; one that is killed leaves a folder that is recognised as a leftover.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

_running: list[threading.Thread] = []
_lock = threading.Lock()


def remove_later(folder: Path) -> None:
    """Start to remove a folder."""
    thread = threading.Thread(target=shutil.rmtree, args=(folder, True), name="shardwise remove")
    with _lock:
        _running[:] = [t for t in _running if t.is_alive()]
        thread.start()
        _running.append(thread)


def finish_removals() -> None:
    """Wait until everything that this process removes is gone."""
    with _lock:
        threads = list(_running)
    for thread in threads:
        thread.join()
