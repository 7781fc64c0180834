"""L5: models of transformers: plans made for them, folders of `from_pretrained` loaded in parts, the Trainer.

Names are loaded on first use, and are listed in `__init__.pyi`; transformers is imported where it is needed only.
"""

from shardwise._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
