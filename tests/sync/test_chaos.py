"""A killed rank of one world neither ends the other nor mixes its versions; `tests.chaos.sync` does this at length."""

from __future__ import annotations

import signal

from shardwise.comm import LocalWorld
from tests.chaos.sync import attack


def test_a_killed_rank_costs_the_other_world_nothing() -> None:
    with LocalWorld(2, timeout=20.0) as trainer, LocalWorld(2, timeout=20.0) as server:
        assert "the trainer pushed" in attack(trainer, server, ("server", 1), signal.SIGKILL, 0.5)
        assert "mixed=0" in attack(trainer, server, ("trainer", 1), signal.SIGKILL, 0.5)
