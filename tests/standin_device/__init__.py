"""A stand-in for a GPU on a machine without one: `SHARDWISE_TEST_DEVICE=standin` runs the tests on its tensors.

`standin.cpp` says what the device is. `register_standin` compiles it once (a minute, kept in torch's folder of
extensions) and gives it its name and its module, `torch.standin`.
"""

from __future__ import annotations

import shutil
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "standin"


def find_compiler() -> str | None:
    """The C++ compiler that torch would use, or None."""
    return shutil.which(cpp_extension.get_cxx_compiler()) if shutil.which("ninja") else None


def register_standin() -> None:
    """Make `torch.device("standin")` a device of this process."""
    if hasattr(torch, NAME):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    native: Any = cpp_extension.load(
        "shardwise_standin_device", [str(Path(__file__).with_name("standin.cpp"))], extra_cflags=["-O1", "-w"]
    )
    torch._register_device_module(NAME, _make_module(native.default_generator()))
    torch.utils.generate_methods_for_privateuse1_backend()


def _make_module(generator: torch.Generator) -> types.ModuleType:
    """`torch.standin`: what torch asks of a device's module."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.synchronize = lambda device=None: None
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.default_generators = (generator,)
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
