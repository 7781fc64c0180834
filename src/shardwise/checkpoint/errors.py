"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is broken, or lacks what was requested; the message names the file and the tensor.

    >>> issubclass(CheckpointError, ValueError)
    True
    """
