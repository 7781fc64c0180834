# The public names, each listed once: type checkers read them here, and `_lazy.attach_stub` does at run time.

from shardwise.hf.loading import load as load
from shardwise.hf.plans import plan as plan
from shardwise.hf.trainer import ShardedAccelerator as ShardedAccelerator
from shardwise.hf.trainer import ShardedTrainer as ShardedTrainer
