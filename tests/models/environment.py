"""Packages of others, imported without their warnings; a test file whose package is missing is skipped."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

_kept: list[Any] = []


def make_torchvision_importable() -> None:
    """A torchvision that was built for another device has no operators, and its import asks for two of them."""
    if importlib.util.find_spec("torchvision") is None or _kept:
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)  # its operators live as long as it does


def import_or_skip(name: str) -> Any:
    """A module, or the reason why the test file that needs it is skipped."""
    make_torchvision_importable()
    with warnings.catch_warnings(action="ignore"):
        found = pytest.importorskip(name, reason=f"{name} is not installed: make test-models")
    if name == "transformers":
        found.logging.set_verbosity_error()
        found.utils.logging.disable_progress_bar()
    return found
