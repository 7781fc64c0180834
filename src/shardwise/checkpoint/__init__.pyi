# The public names, each listed once: type checkers read them here, and `_lazy.attach_stub` does at run time.

from shardwise.checkpoint.saving import Saving as Saving
from shardwise.checkpoint.verify import (
    clean as clean,
    leftovers as leftovers,
)
from shardwise.checkpoint.convert import NameMap as NameMap
from shardwise.checkpoint.files import CheckpointError as CheckpointError
from shardwise.checkpoint.loading import (
    Checkpoint as Checkpoint,
    StoredTensor as StoredTensor,
    compact as compact,
    load as load,
    open as open,
)
from shardwise.checkpoint.resharding import (
    ReshardReport as ReshardReport,
    reshard as reshard,
)
from shardwise.checkpoint.saving import (
    save as save,
    save_hf as save_hf,
)
