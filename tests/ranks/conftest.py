"""Worlds that several test files share; they end with the session."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from shardwise.comm import LocalWorld
from tests.ranks.world import start_world


@pytest.fixture(scope="session")
def shared_worlds() -> Iterator[Callable[[int, float], LocalWorld]]:
    worlds: dict[tuple[int, float], LocalWorld] = {}
    with ExitStack() as stack:

        def find(nprocs: int, timeout: float) -> LocalWorld:
            if (nprocs, timeout) not in worlds:
                worlds[nprocs, timeout] = stack.enter_context(start_world(nprocs, timeout))
            return worlds[nprocs, timeout]

        yield find
