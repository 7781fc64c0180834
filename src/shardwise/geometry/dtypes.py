"""Which element types are there, and how wide is each? One table, so that the pure layers never ask torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from shardwise.geometry.box import LayoutError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its short name, torch's name for it, and its width in bytes."""

    name: str
    torch_name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


DTYPES = (
    DType("f64", "float64", 8),
    DType("f32", "float32", 4),
    DType("f16", "float16", 2),
    DType("bf16", "bfloat16", 2),
    DType("f8e4m3fn", "float8_e4m3fn", 1),
    DType("f8e4m3fnuz", "float8_e4m3fnuz", 1),
    DType("f8e5m2", "float8_e5m2", 1),
    DType("f8e5m2fnuz", "float8_e5m2fnuz", 1),
    DType("f8e8m0fnu", "float8_e8m0fnu", 1),
    DType("f4e2m1fnx2", "float4_e2m1fn_x2", 1),  # one element is a pair of 4-bit floats
    DType("i64", "int64", 8),
    DType("i32", "int32", 4),
    DType("i16", "int16", 2),
    DType("i8", "int8", 1),
    DType("u64", "uint64", 8),
    DType("u32", "uint32", 4),
    DType("u16", "uint16", 2),
    DType("u8", "uint8", 1),
    DType("bool", "bool", 1),
    DType("c128", "complex128", 16),
    DType("c64", "complex64", 8),
    DType("c32", "complex32", 4),
)

_by_name = {key: dtype for dtype in DTYPES for key in (dtype.name, dtype.torch_name, f"torch.{dtype.torch_name}")}


def find_dtype(name: str) -> DType:
    """The element type of a short name or of torch's name.

    >>> find_dtype("bf16").itemsize, find_dtype("float8_e4m3fn").name
    (2, 'f8e4m3fn')
    """
    try:
        return _by_name[name]
    except KeyError:
        known = [d.name for d in DTYPES] + [d.torch_name for d in DTYPES]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(d.name for d in DTYPES)}"
        raise LayoutError(f"unknown dtype {name!r}; {hint}") from None
