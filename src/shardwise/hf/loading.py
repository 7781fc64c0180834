"""From a folder of `save_pretrained` to a sharded model, each rank reading what it stores and no more.

1. The model is made on the meta device, from its config: no rank ever has it whole.
2. `shard_module` allocates the local parts, which are read from the safetensors files, buffers made again.
3. Folders whose tensors transformers converts while it loads them (stacked experts, say) are read by the first rank
   through transformers, and distributed from there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardwise._progress import Progress, check_progress, show_progress
from shardwise._text import public
from shardwise.checkpoint import load as load_checkpoint
from shardwise.checkpoint import open as open_checkpoint
from shardwise.comm import Comm
from shardwise.comm.current import resolve_comm
from shardwise.geometry import Mesh
from shardwise.hf.plans import plan as make_plan
from shardwise.nn.plan import ModelPlan
from shardwise.nn.plan_files import load_plan
from shardwise.nn.shard_module import shard_module
from shardwise.tensor.creation import shard
from shardwise.tensor.sharded_tensor import ShardedTensor


@public
def load(
    model: Any,
    folder: str | os.PathLike[str],
    plan: ModelPlan | Mesh | str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    comm: Any = None,
    progress: Progress = None,
) -> nn.Module:
    """A sharded model with the values of a `from_pretrained` folder; called on every rank.

    - `model`: a model on the meta device, a class of models, a config, or None for what the folder's config says.
    - `plan`: a plan, the file of one, or a mesh, for the plan that `shardwise.hf.plan` makes.
    - `dtype`: that of the parameters; by default the one in the config.
    - `progress`: that of `shardwise.load`: a bar on the first rank's terminal, True, False or a function.

    >>> import shardwise
    >>> model = load(None, "path/to/Llama-3", shardwise.Mesh.of(tp=4))  # doctest: +SKIP
    >>> model.generate(tokens, max_new_tokens=20)  # doctest: +SKIP
    """
    check_progress(progress)
    resolved = resolve_comm(comm)
    made = model if isinstance(model, nn.Module) else build_on_meta(model, folder, dtype)
    if isinstance(plan, Mesh):
        plan = make_plan(made, plan)
    elif not isinstance(plan, ModelPlan):
        plan = load_plan(plan)
    shard_module(made, plan, process_group=resolved, init=lambda m: _fill_from_folder(m, folder, resolved, progress))
    return made.eval()


def build_on_meta(model: Any, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> nn.Module:
    """A model without values: of a class, of a config, or of the config in a folder."""
    own = isinstance(model, transformers.PretrainedConfig)
    config = model if own else transformers.AutoConfig.from_pretrained(folder)
    kind: Any = model if isinstance(model, type) else _find_class(config)
    with torch.device("meta"):
        made: nn.Module = kind._from_config(config, dtype=dtype or config.dtype)
    if (Path(folder) / "generation_config.json").is_file() and hasattr(made, "generation_config"):
        made.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return made


def _find_class(config: Any) -> Any:
    names = config.architectures or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        raise ValueError(f"the config names the architectures {names}, none of which transformers has; pass the class")
    return found


def _fill_from_folder(model: nn.Module, folder: str | os.PathLike[str], comm: Comm, progress: Progress) -> None:
    state = model.state_dict()
    with open_checkpoint(folder) as checkpoint:
        stored = set(checkpoint.names())
    names = match_names(state, stored, getattr(model, "base_model_prefix", ""))
    missing = [name for name, source in names.items() if source is None]
    if missing and not _are_all_tied(missing, model) and hasattr(model, "from_pretrained"):
        _fill_from_first_rank(model, folder, comm, progress)
    else:
        load_checkpoint(state, folder, names=names, strict=False, cast=True, comm=comm, progress=progress)


def match_names(state: Mapping[str, Any], stored: set[str], prefix: str) -> dict[str, str | None]:
    """The stored name of each tensor; a folder of a base model has them without its prefix, or one of a head with it.

    >>> match_names({"bert.pooler.weight": 0, "head.weight": 0}, {"pooler.weight"}, "bert")
    {'bert.pooler.weight': 'pooler.weight', 'head.weight': None}
    """
    found: dict[str, str | None] = {}
    for name in state:
        spellings = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        found[name] = next((s for s in spellings if s in stored), None)
    return found


def _are_all_tied(names: list[str], model: nn.Module) -> bool:
    """Whether each of these parameters has another name that is not among them."""
    others: dict[int, set[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in tensors.items():
        others.setdefault(id(parameter), set()).add(name)
    return all(name in tensors and others[id(tensors[name])] - set(names) for name in names)


def _fill_from_first_rank(model: nn.Module, folder: str | os.PathLike[str], comm: Comm, progress: Progress) -> None:
    first = comm.ranks[0]
    whole: Mapping[str, Tensor] = {}
    if comm.rank == first:
        whole = model.from_pretrained(folder, dtype=next(model.parameters()).dtype).state_dict()  # type: ignore[operator]  # of transformers
    targets = {name: t for name, t in model.state_dict().items() if isinstance(t, ShardedTensor)}
    total = sum(target.nbytes for target in targets.values())
    with torch.no_grad(), show_progress(progress, "loading", total, first=comm.rank == first) as meter:
        for name, target in targets.items():
            target.copy_(shard(whole.get(name), target.sharding, first, comm=comm))
            meter.advance(target.nbytes)
