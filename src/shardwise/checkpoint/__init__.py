"""L4: checkpoints that load anywhere. A folder of safetensors files and one JSON index.

Names are loaded on first use, and are listed in `__init__.pyi`: looking into a checkpoint's index does without torch.
"""

from shardwise._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
