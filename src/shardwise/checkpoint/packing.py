"""Which tensors lie together in a file, and how large a file may grow."""

from __future__ import annotations

from collections.abc import Sequence

MAX_FILE_BYTES = 16 << 30


def packed(sizes: Sequence[tuple[int, int]], max_file_bytes: int, widest_first: bool = True) -> list[list[int]]:
    """The numbers of what lies in each file, from (width of an element, bytes) of each.

    >>> packed([(2, 8), (4, 8), (4, 4)], 14)
    [[1, 2], [0]]
    """
    files: list[list[int]] = []
    room = 0
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i][0] if widest_first else 0):
        if not files or sizes[number][1] > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(number)
        room -= sizes[number][1]
    return files
