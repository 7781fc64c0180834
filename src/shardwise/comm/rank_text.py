"""How are many ranks described in a short message? Runs are folded, equal parts appear once, long lists are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST_RUNS = 8
_MOST_TEXTS = 6
_SHORTEST_RUN = 3


def name_ranks(ranks: Iterable[int]) -> str:
    """Name some ranks, in words that stay short in a large world.

    >>> name_ranks([3]), name_ranks([0, 1]), name_ranks([0, 1, 2, 3, 8])
    ('rank 3', 'ranks 0, 1', 'ranks 0-3, 8')
    >>> name_ranks(range(0, 4096, 2))
    'ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (2048 in all)'
    """
    listed = list(ranks)
    parts = [part for run in _fold_runs(listed) for part in _run_texts(run)]
    shown = ", ".join(parts[:_MOST_RUNS]) + (f", ... ({len(listed)} in all)" if len(parts) > _MOST_RUNS else "")
    return f"rank{'s' * (len(listed) != 1)} {shown or 'none'}"


def _fold_runs(ranks: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _run_texts(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) >= _SHORTEST_RUN else [str(rank) for rank in run]


def ranks_by_text(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each string, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        found.setdefault(text, []).append(rank)
    return found


def fold_texts(by_rank: Mapping[int, str]) -> str:
    """Report what each rank says, equal strings once.

    >>> fold_texts({0: "no tensor", 1: "no tensor", 2: "no tensor", 3: "shape (2,) for (3,)"})
    'ranks 0-2: no tensor; rank 3: shape (2,) for (3,)'
    """
    found = ranks_by_text(by_rank)
    shown = [f"{name_ranks(ranks)}: {text}" for text, ranks in list(found.items())[:_MOST_TEXTS]]
    left = [rank for ranks in list(found.values())[_MOST_TEXTS:] for rank in ranks]
    return "; ".join([*shown, *([f"and others on {name_ranks(sorted(left))}"] if left else [])])


def fold_values(by_rank: Mapping[int, str]) -> str:
    """Tell which value each rank has, equal ones once.

    >>> fold_values({0: "4", 1: "4", 2: "5"})
    '4 on ranks 0, 1 and 5 on rank 2'
    """
    found = ranks_by_text(by_rank)
    shown = [f"{text} on {name_ranks(ranks)}" for text, ranks in list(found.items())[:_MOST_TEXTS]]
    left = [rank for ranks in list(found.values())[_MOST_TEXTS:] for rank in ranks]
    return " and ".join([*shown, *([f"others on {name_ranks(sorted(left))}"] if left else [])])
