"""The names of `torch.distributed._shard.sharded_tensor.logger`."""

import logging


def _get_or_create_logger() -> logging.Logger:
    logger = logging.getLogger("sharding-spec-NullHandler")
    if not logger.handlers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    return logger


__all__ = ["_get_or_create_logger"]
