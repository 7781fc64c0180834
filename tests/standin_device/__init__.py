"""A stand-in for a GPU on a machine without one: `SHARDWISE_TEST_DEVICE=standin` runs the tests on its tensors.

`standin.cpp` says what the device is. `register_standin` compiles it once (a minute, kept in torch's folder of
extensions) and gives it its name and its module.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension


def register_standin(name: str) -> None:
    """Make `torch.device(name)` a device of this process, and `torch.<name>` its module."""
    if hasattr(torch, name):
        return
    torch.utils.rename_privateuse1_backend(name)
    native: Any = cpp_extension.load(
        "shardwise_standin_device", [str(Path(__file__).with_name("standin.cpp"))], extra_cflags=["-O1", "-w"]
    )
    torch._register_device_module(name, _make_module(name, native.default_generator()))
    torch.utils.generate_methods_for_privateuse1_backend()


class StandinStream:
    """The device's only stream; its work is done when a call returns."""

    def synchronize(self) -> None: ...

    def wait_stream(self, other: StandinStream) -> None: ...


def _make_module(name: str, generator: torch.Generator) -> types.ModuleType:
    """What torch asks of a device's module."""
    module: Any = types.ModuleType(f"torch.{name}")
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.synchronize = lambda device=None: None
    stream = StandinStream()
    module.current_stream = module.default_stream = lambda device=None: stream
    module.stream = lambda stream: nullcontext()
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.default_generators = (generator,)
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
