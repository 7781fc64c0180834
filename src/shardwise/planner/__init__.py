"""What will a training step of a model need? Memory, traffic and time of a plan, before anything is allocated."""

from shardwise.planner.estimate import estimate
from shardwise.planner.figures import Estimate, ParameterRow, StepMove
from shardwise.planner.hardware import DEVICES, OPTIMIZERS, Device, OptimizerState

__all__ = ["DEVICES", "OPTIMIZERS", "Device", "Estimate", "OptimizerState", "ParameterRow", "StepMove", "estimate"]
