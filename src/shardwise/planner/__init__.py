"""What will a training step of a model need? Memory, traffic and time of a plan, before anything is allocated."""

from shardwise.planner.estimate import (
    OPTIMIZERS,
    Estimate,
    OptimizerState,
    ParameterRow,
    StepMove,
    estimate,
)
from shardwise.transfer.cost import DEVICES, Device

__all__ = ["DEVICES", "OPTIMIZERS", "Device", "Estimate", "OptimizerState", "ParameterRow", "StepMove", "estimate"]
