"""What will a training step of a model need, and which plan is the best? Before anything is allocated."""

from shardwise.planner.auto import AutoPlanner, Certificate, FoundPlan, explain_plan
from shardwise.planner.estimate import (
    OPTIMIZERS,
    Estimate,
    OptimizerState,
    ParameterRow,
    StepMove,
    estimate,
)
from shardwise.planner.sweep import Sweep, sweep
from shardwise.transfer.cost import DEVICES, Device

__all__ = [
    "DEVICES",
    "OPTIMIZERS",
    "AutoPlanner",
    "Certificate",
    "Device",
    "Estimate",
    "FoundPlan",
    "OptimizerState",
    "ParameterRow",
    "StepMove",
    "Sweep",
    "estimate",
    "explain_plan",
    "sweep",
]
