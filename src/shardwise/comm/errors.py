"""What can go wrong between ranks: a transport that failed, or ranks that asked for different things."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective could not be completed: a rank died, raised, timed out, or made another call.

    >>> raise CommError("'gather w': rank 2 did not take part within 5 s", ranks=(2,))
    Traceback (most recent call last):
    ...
    shardwise.comm.errors.CommError: 'gather w': rank 2 did not take part within 5 s
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[CommError], tuple[str, tuple[int, ...]], dict[str, object]]:
        return type(self), (str(self), self.ranks), self.__dict__


class DisagreementError(ValueError):
    """Ranks called one collective operation with different arguments; every rank raises it.

    >>> issubclass(DisagreementError, ValueError)
    True
    """
