"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is broken, or does not hold what is asked of it; the text names the file and the tensor.

    >>> issubclass(CheckpointError, ValueError)
    True
    """
