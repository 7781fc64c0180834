"""Commands that compare: `diff`, where two checkpoints differ; `digest`, one number for the weights of one."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from shardwise._progress import show_progress
from shardwise._text import parse_json
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.index import Scalar, TensorEntry, block_count, stored_names
from shardwise.checkpoint.verify import ComparedTensor, Difference, StoredLayouts, Tolerance, compare_stored
from shardwise.cli.inspect import NamePatterns, OpenedCheckpoint, filter_names, open_checkpoint
from shardwise.cli.output import NO, AsJson, escape_for_terminal, format_count, print_json, shorten_title
from shardwise.geometry.state_map import TensorShape
from shardwise.view import line, print_lines

SHOWN = 50
MOST_DIGEST_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorDiff:
    """A tensor that both have: how its type, shape and values differ; `values` is None where shapes differ."""

    name: str
    a: TensorEntry
    b: TensorEntry
    values: Difference | None

    @property
    def same(self) -> bool:
        return self.a.dtype == self.b.dtype and self.values is not None and self.values.count == 0


@dataclass(frozen=True)
class ValueDiff:
    """Non-tensors that differ; `compared` is the number of names looked at, None where a format has no values."""

    compared: int | None = None
    only_a: Mapping[str, Scalar] = field(default_factory=dict)
    only_b: Mapping[str, Scalar] = field(default_factory=dict)
    different: Mapping[str, tuple[Scalar, Scalar]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.only_a) + len(self.only_b) + len(self.different)


@dataclass(frozen=True)
class Comparison:
    """All that two checkpoints differ in: layouts as rules by name of the tensor; `opaque` cannot be compared."""

    only_a: Sequence[str]
    only_b: Sequence[str]
    tensors: Sequence[TensorDiff]
    layouts: Mapping[str, tuple[str, str]]
    values: ValueDiff
    opaque: Sequence[str] = ()

    @property
    def different(self) -> list[TensorDiff]:
        return [t for t in self.tensors if not t.same]

    def same(self, with_layouts: bool) -> bool:
        """Whether there is nothing to report."""
        return not any((self.only_a, self.only_b, self.different, self.values)) and not (with_layouts and self.layouts)


PathA = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder, or a .safetensors or .pt file.")]
PathB = Annotated[str, typer.Argument(metavar="B", help="Another one, of any format, layout and number of ranks.")]
Atol = Annotated[float, typer.Option(min=0, help="Elements are equal if |a - b| <= ATOL + RTOL * |b|.")]
Rtol = Annotated[float, typer.Option(min=0, help="See --atol. Without both, bits are compared; NaN equals NaN.")]
WithLayouts = Annotated[bool, typer.Option("--layouts", help="Count tensors of different layouts as different.")]
ByDigest = Annotated[
    bool,
    typer.Option("--digest", help="Compare digests: each side is read by itself, or was: A or B may be digest's JSON."),
]
Names = Annotated[
    str | None, typer.Option(metavar="FILE", help="With --digest: how B's tensors are made of A's, as for reshard.")
]
Limit = Annotated[int, typer.Option(min=0, metavar="N", help="Show at most N differences; 0: all.")]


def diff(
    a: PathA,
    b: PathB,
    name: NamePatterns = None,
    atol: Atol = 0.0,
    rtol: Rtol = 0.0,
    layouts: WithLayouts = False,
    digest: ByDigest = False,
    names: Names = None,
    limit: Limit = SHOWN,
    as_json: AsJson = False,
) -> None:
    """Compare the tensors and values of two checkpoints, whatever their formats, layouts and numbers of ranks.

    Exit status 0: the same; 1: different; 2: one of them cannot be read.

    \b
    Examples:
      shardwise diff runs/step-1000 runs/step-2000
      shardwise diff runs/step-1000 model-hf --name "model.*" --rtol 1e-3
      shardwise diff runs/step-1000 served.json --digest --names fused.toml
    """
    if digest:
        if atol or rtol or layouts:
            raise CheckpointError("digests are of bits: --atol, --rtol and --layouts are for diff without --digest")
        if not diff_digests(a, b, name or [], names, limit, as_json):
            raise typer.Exit(NO)
        return
    if names is not None:
        raise CheckpointError("--names says how tensors are made of others, which diff compares with --digest only")
    first, second = open_checkpoint(a), open_checkpoint(b)
    found = compare(first, second, name or [], Tolerance(atol, rtol))
    same = found.same(layouts)
    if as_json:
        print_json(comparison_to_json(first, second, found, same))
    else:
        texts = [shorten_title(text) for text in comparison_to_texts(found)]
        hidden = len(texts) - limit if limit else 0
        more = [f"and {hidden} more; --limit 0 shows all"] if hidden > 0 else []
        shown = [*texts[: limit or None], *more, format_answer(found, same, layouts)]
        print_lines([line(escape_for_terminal(text)) for text in shown], sys.stdout)
    if not same:
        raise typer.Exit(NO)


def diff_digests(a: str, b: str, patterns: Sequence[str], names: str | None, limit: int, as_json: bool) -> bool:
    """Print which tensors have other digests; whether none has."""
    first, second = _find_digests(a, patterns, names), _find_digests(b, patterns, None)
    only_a, only_b = ([n for n in one if n not in other] for one, other in ((first, second), (second, first)))
    different = [name for name in first if name in second and first[name] != second[name]]
    same, both = not (only_a or only_b or different), len(first) - len(only_a)
    if not first and not second:
        raise CheckpointError(f"neither {a} nor {b} has a tensor called {' or '.join(patterns) or 'anything'}")
    if as_json:
        rows = [{"name": name, "a": first[name], "b": second[name]} for name in different]
        found = {"compared": both, "only_a": only_a, "only_b": only_b, "different": rows}
        print_json({"a": a, "b": b, "same": same, **found})
        return same
    texts = [f"only in A: tensor {name}" for name in only_a] + [f"only in B: tensor {name}" for name in only_b]
    texts += [f"{name}: {first[name]} in A, {second[name]} in B" for name in different]
    hidden = len(texts) - limit if limit else 0
    shown = [*texts[: limit or None], *([f"and {hidden} more; --limit 0 shows all"] if hidden > 0 else [])]
    counts = ((len(different), "in both"), (len(only_a), "only in A"), (len(only_b), "only in B"))
    answer = ", ".join(f"{format_count(count, 'tensor')} {where}" for count, where in counts if count)
    shown.append(f"the same: {format_count(both, 'tensor')} by digest" if same else f"different: {answer}")
    print_lines([line(escape_for_terminal(text)) for text in shown], sys.stdout)
    return same


def _find_digests(path: str, patterns: Sequence[str], names: str | None) -> dict[str, str]:
    """The digest of each tensor by name: of a checkpoint, as it is or as a map makes it, or what digest printed."""
    from shardwise.checkpoint.digests import digest_made, digest_stored  # these load torch
    from shardwise.checkpoint.loading import Checkpoint
    from shardwise.sync.plan import resolve_map

    known = _read_digests(path)
    if known is not None:
        if names is not None:
            raise CheckpointError(f"{path}: --names needs the tensors of A; of other names only digests are known")
        return {name: known[name] for name in filter_names(known, patterns)}
    opened = open_checkpoint(path)
    with Checkpoint(opened.store) as checkpoint:
        types = {
            n: TensorShape(tuple(checkpoint[n].shape), opened.store.index.tensors[n].dtype.name)
            for n in checkpoint.names()
        }
        targets = None if names is None else resolve_map(names, types).targets
        listed = filter_names(types if targets is None else targets, patterns)
        found = {}
        with show_progress(None, f"reading {path}", len(listed)) as meter:
            for name in listed:
                found[name] = (
                    digest_stored(checkpoint, name) if targets is None else digest_made(checkpoint, targets[name])
                )
                meter.advance(1)
    return found


def _read_digests(path: str) -> dict[str, str] | None:
    """The digests by name in a file that `shardwise digest --json` printed; None for another file."""
    if not path.endswith(".json") or not os.path.isfile(path) or os.path.getsize(path) > MOST_DIGEST_BYTES:
        return None
    with open(path, encoding="utf-8") as file:
        data = parse_json(file.read())
    tensors = data.get("tensors") if isinstance(data, dict) and "digest" in data else None
    if not isinstance(tensors, dict):
        return None
    return {str(name): str(value) for name, value in tensors.items()}


def compare(
    first: OpenedCheckpoint, second: OpenedCheckpoint, patterns: Sequence[str], tolerance: Tolerance
) -> Comparison:
    """Compare two checkpoints; a progress bar shows what has been read."""
    sides = [_tensors_of(found, patterns) for found in (first, second)]
    both = [name for name in sides[0] if name in sides[1]]
    pairs = [(name, sides[0][name], sides[1][name]) for name in both]
    total = sum(a.nbytes for _, a, b in pairs if a.shape == b.shape)
    with show_progress(None, "comparing", total) as meter:
        advance = meter.advance
        tensors = [
            TensorDiff(
                name,
                a,
                b,
                _compare_tensor(ComparedTensor(first.store, a), ComparedTensor(second.store, b), tolerance, advance),
            )
            for name, a, b in pairs
        ]
    only_a, only_b = ([n for n in one if n not in other] for one, other in (sides, sides[::-1]))
    values = _value_differences(first, second, patterns, tolerance)
    if patterns and not any(sides) and not values.compared:
        raise CheckpointError(f"neither {first.path} nor {second.path} has anything called {' or '.join(patterns)}")
    opaque = sorted({name for found in (first, second) for name in filter_names(found.store.index.opaque, patterns)})
    return Comparison(only_a, only_b, tensors, _layout_differences(pairs), values, opaque)


def _tensors_of(found: OpenedCheckpoint, patterns: Sequence[str]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint by their names in its state."""
    index = found.store.index
    named = stored_names(index)
    own = {stored: name for name, stored in named.items()}  # the last name of each is that of the tree
    return {name: index.tensors[named[name]] for name in filter_names(own.values(), patterns)}


def _compare_tensor(a: ComparedTensor, b: ComparedTensor, tolerance: Tolerance, advance: Any) -> Difference | None:
    """The difference between the values of two tensors; damaged bytes are an error, never a difference."""
    if a.entry.shape != b.entry.shape:
        return None
    found = compare_stored(a, b, tolerance, advance)
    if found.count:
        for side in (a, b):
            for box, (_, elements) in enumerate(side.entry.cut.extents):
                blocks = block_count(elements * side.entry.dtype.itemsize, side.store.index.block_bytes)
                side.store.verify(side.entry, box, 0, blocks)
    return found


def _layout_differences(pairs: Sequence[tuple[str, TensorEntry, TensorEntry]]) -> dict[str, tuple[str, str]]:
    layouts = StoredLayouts()
    known: dict[tuple[int, int], bool] = {}
    found: dict[str, tuple[str, str]] = {}
    for name, a, b in pairs:
        key = (id(a.cut), id(b.cut))
        if key not in known:
            known[key] = layouts.layout(a) == layouts.layout(b) or None in (layouts.notation(a), layouts.notation(b))
        if a.shape == b.shape and not known[key]:
            found[name] = (layouts.notation(a) or "", layouts.notation(b) or "")
    return found


def _value_differences(
    first: OpenedCheckpoint, second: OpenedCheckpoint, patterns: Sequence[str], tolerance: Tolerance
) -> ValueDiff:
    """What differs besides the tensors; formats that cannot store values are not compared."""
    if not (first.store.format.has_values and second.store.format.has_values):
        return ValueDiff()
    stored = [dict(found.store.index.values) for found in (first, second)]
    a, b = ({name: values[name] for name in filter_names(values, patterns)} for values in stored)
    return ValueDiff(
        compared=len({*a, *b}),
        only_a={name: value for name, value in a.items() if name not in b},
        only_b={name: value for name, value in b.items() if name not in a},
        different={n: (a[n], b[n]) for n in a if n in b and not same_value(a[n], b[n], tolerance)},
    )


def same_value(a: Scalar, b: Scalar, tolerance: Tolerance) -> bool:
    """Whether two values are of one type and equal, floats as elements of tensors are.

    >>> same_value(1, True, Tolerance()), same_value(1.0, 1.05, Tolerance(atol=0.1))
    (False, True)
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        near = not math.isinf(a - b) and abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)
        return a == b or near or (math.isnan(a) and math.isnan(b))
    return a == b


def comparison_to_texts(found: Comparison) -> list[str]:
    """A line for each difference; tensors whose layouts differ alike share one."""
    lines = [f"only in A: tensor {name}" for name in found.only_a]
    lines += [f"only in B: tensor {name}" for name in found.only_b]
    for tensor in found.different:
        lines += [f"{tensor.name}: {text}" for text in _tensor_texts(tensor)]
    lines += [f"only in A: {name} = {value!r}" for name, value in found.values.only_a.items()]
    lines += [f"only in B: {name} = {value!r}" for name, value in found.values.only_b.items()]
    lines += [f"{name}: {a!r} in A, {b!r} in B" for name, (a, b) in found.values.different.items()]
    groups: dict[tuple[str, str], list[str]] = {}
    for name, rules in found.layouts.items():
        groups.setdefault(rules, []).append(name)
    for (a, b), names in groups.items():
        more = f" and {format_count(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
        lines.append(f"{names[0]}{more}: layout {a} in A, {b} in B")
    return lines


def _tensor_texts(tensor: TensorDiff) -> list[str]:
    a, b, values = tensor.a, tensor.b, tensor.values
    lines = [f"{a.dtype} in A, {b.dtype} in B"] if a.dtype != b.dtype else []
    if values is None:
        return [*lines, f"shape {a.shape} in A, {b.shape} in B"]
    if not values.count:
        return lines
    share = f"{values.count} of {math.prod(a.shape)} elements differ"
    return [*lines, f"{share}, by at most {values.max_abs:.6g}, relative {values.max_rel:.6g}"]


def format_answer(found: Comparison, same: bool, with_layouts: bool) -> str:
    """The answer in one line."""
    notes = "" if found.values.compared is not None else "; values are not compared: one of the formats has none"
    if found.opaque:
        notes += f"; {len(found.opaque)} that cannot be read are not compared: {', '.join(found.opaque[:3])}"
    if found.layouts and not with_layouts:
        notes += f"; {len(found.layouts)} of other layout (--layouts counts them)"
    if same:
        values = f", {format_count(found.values.compared, 'value')}" if found.values.compared else ""
        return f"the same: {format_count(len(found.tensors), 'tensor')}{values}{notes}"
    counts = [
        (len(found.different), f"{len(found.different)} of {format_count(len(found.tensors), 'tensor')} in both"),
        (len(found.only_a), f"{format_count(len(found.only_a), 'tensor')} only in A"),
        (len(found.only_b), f"{format_count(len(found.only_b), 'tensor')} only in B"),
        (len(found.values), format_count(len(found.values), "value")),
        (len(found.layouts) if with_layouts else 0, format_count(len(found.layouts), "layout")),
    ]
    return f"different: {', '.join(text for count, text in counts if count)}{notes}"


def comparison_to_json(
    first: OpenedCheckpoint, second: OpenedCheckpoint, found: Comparison, same: bool
) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "a": {"path": first.path, "format": first.format},
        "b": {"path": second.path, "format": second.format},
        "same": same,
        "compared": len(found.tensors),
        "only_a": found.only_a,
        "only_b": found.only_b,
        "different": [_tensor_json(t) for t in found.different],
        "opaque": found.opaque,
        "layouts": [{"name": name, "a": a, "b": b} for name, (a, b) in found.layouts.items()],
        "values": {
            "compared": found.values.compared,
            "only_a": found.values.only_a,
            "only_b": found.values.only_b,
            "different": [{"name": name, "a": a, "b": b} for name, (a, b) in found.values.different.items()],
        },
    }


def _tensor_json(tensor: TensorDiff) -> dict[str, Any]:
    values = tensor.values
    return {
        "name": tensor.name,
        "dtype": {"a": tensor.a.dtype.name, "b": tensor.b.dtype.name},
        "shape": {"a": list(tensor.a.shape), "b": list(tensor.b.shape)},
        "elements": None if values is None else values.count,
        "max_abs": None if values is None else values.max_abs,
        "max_rel": None if values is None else values.max_rel,
    }


Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: its folder, or a .safetensors or .pt file.")]
ByTensor = Annotated[bool, typer.Option("--by-tensor", help="Print the digest of each tensor as well.")]


def digest(path: Path, name: NamePatterns = None, by_tensor: ByTensor = False, as_json: AsJson = False) -> None:
    """Print the digest of a checkpoint's tensors: equal for equal weights in any format, layout and number of ranks.

    It is that of `shardwise.digest(state)` of the same tensors, and that of a server's `link.verify()`.

    \b
    Examples:
      shardwise digest runs/step-1000
      shardwise digest model-hf --name "model.layers.0.*" --by-tensor
    """
    from shardwise.checkpoint.digests import digest_of, digest_stored
    from shardwise.checkpoint.loading import Checkpoint  # these load torch

    opened = open_checkpoint(path)
    with Checkpoint(opened.store) as checkpoint:
        names = filter_names(checkpoint.names(), name or [])
        if not names:
            raise CheckpointError(f"{path}: no tensor fits {', '.join(name or ['*'])}")
        found = {}
        with show_progress(None, "reading", sum(checkpoint[each].nbytes for each in names)) as meter:
            for each in names:
                found[each] = digest_stored(checkpoint, each)
                meter.advance(checkpoint[each].nbytes)
    total = digest_of(found)
    if as_json:
        print_json({"path": path, "digest": total.hex, "tensors": dict(total.by_tensor)})
        return
    rows = [f"{value}  {key}" for key, value in total.by_tensor.items()] if by_tensor else []
    texts = [*rows, f"{total.hex}  {len(found)} tensors of {path}"]
    print_lines([line(escape_for_terminal(text)) for text in texts], sys.stdout)
