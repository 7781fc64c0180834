"""Stored elements as numbers that NumPy can compute with, and as elements of another type. Never loads torch.

Floats of any width become float64, complex numbers complex128, integers int64 or uint64. Floats of 8 bits are looked up
in a table of their 256 values, which follows from the width of the exponent and how the format spends its codes.

Conversions round as torch's do: to the nearest, ties to even; what is too large becomes infinite, NaN stays NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.errors import CheckpointError
from shardwise.geometry import DType, LayoutError, find_dtype

CASTABLE = ("float64", "float32", "float16", "bfloat16")
_NATIVE = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "u1",
    "complex128": "<c16",
    "complex64": "<c8",
}
_WIDE = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.uint64}
_EXPONENT_BITS = {"float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e5m2": 5, "float8_e5m2fnuz": 5}


def decode_numbers(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """A row of stored elements, given as unsigned numbers of their width, as float64, complex128, int64 or uint64.

    >>> from shardwise.geometry import find_dtype
    >>> decode_numbers(np.array([0x3F80, 0xC000], np.uint16), find_dtype("bf16")).tolist()
    [1.0, -2.0]
    """
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs
        return _decode_bits(np.ascontiguousarray(bits), dtype)


def _decode_bits(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    name = dtype.torch_name
    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name == "complex32":
        parts = bits.view(np.float16).reshape(-1, 2).astype(np.float64)
        return np.asarray(parts[:, 0] + 1j * parts[:, 1])
    if name.startswith("float8"):
        return np.asarray(decode_float8_codes(name)[bits])
    if name not in _NATIVE:
        raise CheckpointError(f"elements of type {dtype} are not single numbers; they are only compared bit by bit")
    native = bits.view(_NATIVE[name])
    return native.astype(_WIDE[native.dtype.kind])


def has_numbers(dtype: DType) -> bool:
    """Whether the elements of a type are single numbers: one of the pairs of 4-bit floats is not."""
    return not dtype.torch_name.startswith("float4")


@cache
def decode_float8_codes(name: str) -> npt.NDArray[np.float64]:
    """The values of all 256 codes of an 8-bit float.

    >>> decode_float8_codes("float8_e5m2")[[0x3C, 0x7C, 0x7F]].tolist()
    [1.0, inf, nan]
    """
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.asarray(np.where(codes == 255, np.nan, 2.0 ** (codes - 127)), np.float64)
    width = _EXPONENT_BITS[name]
    fraction_bits, unsigned_zero = 7 - width, name.endswith("uz")
    bias = 2 ** (width - 1) - (0 if unsigned_zero else 1)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, fraction = (codes & 127) >> fraction_bits, codes & (2**fraction_bits - 1)
    part = fraction / 2**fraction_bits
    size = np.where(exponent == 0, part * 2.0 ** (1 - bias), (1 + part) * 2.0 ** (exponent - bias))
    values: npt.NDArray[np.float64] = sign * size
    if unsigned_zero:
        values[128] = np.nan
    elif name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[exponent == 2**width - 1] = np.nan
        values[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return values


def find_cast_dtype(name: str) -> DType:
    """The element type to convert to; an error for types that nothing is converted to.

    >>> find_cast_dtype("bf16").torch_name
    'bfloat16'
    """
    try:
        found = find_dtype(name)
    except LayoutError as error:
        raise CheckpointError(str(error)) from error
    if found.torch_name not in CASTABLE:
        known = ", ".join(find_dtype(known).name for known in CASTABLE)
        raise CheckpointError(f"elements are not converted to {found}; pass one of {known}")
    return found


def converted_dtype(stored: DType, wanted: DType | None) -> DType:
    """The element type of a tensor after a conversion; only floats of 16 bits or more are converted.

    >>> bf16 = find_dtype("bf16")
    >>> [converted_dtype(find_dtype(name), bf16).name for name in ("f32", "i64", "f8e4m3fn", "c64")]
    ['bf16', 'i64', 'f8e4m3fn', 'c64']
    """
    return wanted if wanted is not None and stored.torch_name in CASTABLE else stored


def convert_elements(bits: npt.NDArray[Any], stored: DType, wanted: DType) -> npt.NDArray[Any]:
    """A row of floats, given as unsigned numbers of their width, as floats of another type in the same form.

    >>> stored = np.array([1.0, -2.5], np.float32).view(np.uint32)
    >>> [hex(n) for n in convert_elements(stored, find_dtype("f32"), find_dtype("bf16")).tolist()]
    ['0x3f80', '0xc020']
    """
    with np.errstate(all="ignore"):
        if wanted.torch_name == "bfloat16":
            return _round_to_bfloat16(_decode_float32(bits, stored))
        kind = np.dtype(_NATIVE[wanted.torch_name])
        if stored.torch_name == "bfloat16":
            numbers: npt.NDArray[Any] = _decode_float32(bits, stored)
        else:
            numbers = bits.view(_NATIVE[stored.torch_name])
        if stored.torch_name == "float64" and wanted.torch_name == "float16":
            numbers = numbers.astype(np.float32)  # as torch: rounded twice
        return numbers.astype(kind).view(f"<u{kind.itemsize}")


def _decode_float32(bits: npt.NDArray[Any], stored: DType) -> npt.NDArray[np.float32]:
    if stored.torch_name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(_NATIVE[stored.torch_name]).astype(np.float32)


def _round_to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = numbers.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded
