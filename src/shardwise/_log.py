"""Loggers: one for each package, all below "shardwise", quiet until an application asks for them."""

from __future__ import annotations

import logging

logging.getLogger("shardwise").addHandler(logging.NullHandler())  # without it Python prints warnings by itself


def package_logger(module: str) -> logging.Logger:
    """The logger of the package that a module belongs to.

    >>> package_logger("shardwise.comm.transports.gloo").name
    'shardwise.comm'
    """
    return logging.getLogger(".".join(module.split(".")[:2]))
