"""What does a device have, and what does an optimizer keep? Two small tables, and values of your own."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.geometry.dtypes import DType
from shardwise.nn.patterns import PlanError


@dataclass(frozen=True)
class Device:
    """Memory in bytes, and dense operations per second in bf16; `efficiency` is the share that products reach.

    >>> find_device("h100").memory_bytes
    80000000000
    """

    name: str
    memory_bytes: int
    flops: float
    efficiency: float = 0.5

    def seconds(self, flops: int, dtype: DType) -> float:
        """The time that matrix products of this many operations take in a dtype: 32 bits take twice as long as 16."""
        return flops / (self.flops * self.efficiency) * max(1, dtype.itemsize / 2)


GB, TERA = 10**9, 1e12
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GB, 312 * TERA),
        Device("a100", 80 * GB, 312 * TERA),
        Device("h100", 80 * GB, 989 * TERA),
        Device("h200", 141 * GB, 989 * TERA),
        Device("b200", 180 * GB, 2250 * TERA),
        Device("mi300x", 192 * GB, 1307 * TERA),
    )
}


def find_device(device: str | Device) -> Device:
    """A device by name, or the one that is passed."""
    if isinstance(device, Device):
        return device
    if device.lower() not in DEVICES:
        raise PlanError(
            f"the device {device!r} is not known; known are {', '.join(DEVICES)}; pass Device(name, memory_bytes, "
            "flops) for another one"
        )
    return DEVICES[device.lower()]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps for each element: tensors of the parameter's dtype, and further bytes.

    >>> from shardwise.geometry.dtypes import find_dtype
    >>> OptimizerState(tensors=2).bytes_for(10, find_dtype("f32"))
    80
    """

    tensors: int
    more_bytes: int = 0

    def bytes_for(self, elements: int, dtype: DType) -> int:
        return elements * (self.tensors * dtype.itemsize + self.more_bytes)


OPTIMIZERS = {
    "none": OptimizerState(0),
    "sgd": OptimizerState(0),
    "momentum": OptimizerState(1),
    "adagrad": OptimizerState(1),
    "rmsprop": OptimizerState(1),
    "lion": OptimizerState(1),
    "muon": OptimizerState(1),
    "adam": OptimizerState(2),
    "adamw": OptimizerState(2),
    "adamw8bit": OptimizerState(0, 2),
    "adamw-fp32": OptimizerState(0, 12),  # both moments and a copy of the parameters in 32 bits
}


def find_optimizer(name: str | OptimizerState) -> OptimizerState:
    """What an optimizer keeps, by its name.

    >>> from shardwise.geometry.dtypes import find_dtype
    >>> find_optimizer("adamw").bytes_for(10, find_dtype("bf16"))
    40
    """
    if isinstance(name, OptimizerState):
        return name
    if name.lower() not in OPTIMIZERS:
        raise PlanError(
            f"the optimizer {name!r} is not known; known are {', '.join(OPTIMIZERS)}; pass OptimizerState(tensors, "
            "more_bytes) for another one"
        )
    return OPTIMIZERS[name.lower()]
