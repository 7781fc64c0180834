"""What will a training step of a model need? Memory, traffic and time of a plan, before anything is allocated."""

from shardwise.planner.estimate import (
    DEVICES,
    OPTIMIZERS,
    Device,
    Estimate,
    OptimizerState,
    ParameterRow,
    StepMove,
    estimate,
)

__all__ = ["DEVICES", "OPTIMIZERS", "Device", "Estimate", "OptimizerState", "ParameterRow", "StepMove", "estimate"]
