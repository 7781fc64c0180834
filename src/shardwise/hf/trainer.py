"""The Accelerator of accelerate and the Trainer of transformers for a sharded model: their loops and files, unchanged.

What differs: batches are divided over the axes that split inputs and are the same along all others, the model is not
wrapped in DistributedDataParallel, and every rank takes part in saving, of which one writes whole tensors. They are
loaded in parts, each rank reading its own.

A model's own loss is that of the whole batch, on every rank. A loss that is computed from outputs (label smoothing,
`compute_loss_func`, the trainers of trl, which come after ShardedTrainer among the bases) is one of this rank's rows,
of which such code expects the average over ranks: the gradients of rows are divided by the number of parts of a batch.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise._tree import map_nest
from shardwise.checkpoint import load
from shardwise.comm.agree import gather_values
from shardwise.nn.inputs import ShardedBy, batch_placements, call_together, find_aliases, gather_state, place_inputs
from shardwise.nn.optimizer import shard_state
from shardwise.nn.plan import PlanError
from shardwise.tensor.sharded_tensor import ShardedTensor


class ShardedAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # no types without accelerate
    """`accelerate.Accelerator` for a model that `shard_module` sharded by a plan with `output_plan="plain"`.

    >>> accelerator = ShardedAccelerator()  # doctest: +SKIP
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> accelerator.save_state("folder")  # doctest: +SKIP
    """

    sharded_by: ShardedBy

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """What `Accelerator.prepare` makes of models, optimizers and loaders; one of the models is sharded."""
        found = [by for by in (getattr(a, "_sharded_by", None) for a in args) if isinstance(by, ShardedBy)]
        if found:
            self.sharded_by = found[0]
        elif not hasattr(self, "sharded_by"):
            raise PlanError(
                "ShardedAccelerator prepares a model that shard_module sharded by a ModelPlan; shard it first"
            )
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """A model for mixed precision; a sharded one is not wrapped."""
        by = getattr(model, "_sharded_by", None)
        if isinstance(by, ShardedBy):
            self.sharded_by = by
        return super().prepare_model(model, device_placement, evaluation_mode or by is not None)

    def prepare_data_loader(self, loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        """A loader of this rank's part of each batch; ranks without a part of their own have the same rows."""
        comm, seed = self.sharded_by.comm, self.dataloader_config.data_seed
        seeds = gather_values(comm, torch.initial_seed() if seed is None else seed, label="prepare_data_loader")
        count, index = count_parts(self.sharded_by)
        made = prepare_data_loader(
            loader,
            self.device,
            num_processes=count,
            process_index=index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=[],  # each rank draws the same order from the seed
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=True,
            data_seed=seeds[comm.ranks[0]],
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that makes as many steps with the optimizer as there are parts of a batch, as accelerate's do."""
        made, parts = super().prepare_scheduler(scheduler), count_parts(self.sharded_by)[0]
        if not made.split_batches and parts != self.num_processes:
            made.__class__, made.split_batches, made.parts = _SchedulerOfParts, True, parts
        return made

    def gather_for_metrics(self, tree: Any, use_gather_object: bool = False) -> Any:
        """The rows of all ranks with other batches, without those that were added to fill the last batch.

        Of numbers (a count, a sum) there is one for each batch.
        """
        plan, state = self.sharded_by.plan, self.gradient_state
        leaves = pytree.tree_leaves(tree)
        if leaves and all(isinstance(t, Tensor) and t.ndim == 0 for t in leaves):
            tree, state = pytree.tree_map(lambda t: t.unsqueeze(0), tree), None
        whole = pytree.tree_map(
            lambda t: t.full() if isinstance(t, ShardedTensor) else t,
            place_inputs(tree, plan.mesh, batch_placements(plan.input_placements or ()), self.sharded_by.comm),
        )
        if state is None or not state.end_of_dataloader or state.remainder <= 0:
            return whole
        return pytree.tree_map(lambda t: t[: state.remainder] if isinstance(t, Tensor) and t.ndim else t, whole)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """A model's state with whole tensors, in CPU memory of the first rank; empty on the others. On every rank."""
        by = getattr(self.unwrap_model(model), "_sharded_by", None)
        state = super().get_state_dict(model, unwrap)
        return state if by is None else OrderedDict(gather_state(state, by.comm, model))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Write the state of all that was prepared, its tensors whole; called on every rank."""
        save = super().save_state
        with whole_states(self._optimizers, self.sharded_by):
            return call_together(self.sharded_by.comm, "save_state", lambda: save(*args, **kwargs))

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Read what `save_state` wrote, also on another number of ranks; called on every rank."""
        hooks = [self.register_load_state_pre_hook(self._load_models)]
        for optimizer in self._optimizers:
            hooks.append(_find_inner(optimizer).register_load_state_dict_post_hook(shard_optimizer_state))
        try:
            super().load_state(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _load_models(self, models: list[Any], folder: str) -> None:
        """A hook of `load_state`: read the files of models in parts, and leave none to accelerate."""
        for number, model in enumerate(models):
            ending = f"_{number}" if number else ""
            names = (f"model{ending}.safetensors", f"pytorch_model{ending}.bin")
            found = [path for name in names if os.path.exists(path := os.path.join(folder, name))]
            if not found:
                raise FileNotFoundError(f"load_state: {folder} has neither {' nor '.join(names)}")
            names_of = find_aliases(model) if found[0].endswith(".safetensors") else {}  # which store a tensor once
            state = {name: t for name, t in model.state_dict().items() if names_of.get(name, name) == name}
            load(state, found[0], comm=self.sharded_by.comm)
        models.clear()


class _SchedulerOfParts(accelerate.scheduler.AcceleratedScheduler):  # type: ignore[misc]  # no types without accelerate
    """A scheduler of accelerate that steps once for each part of a batch, not for each rank."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.parts):
            super().step(*args, **kwargs)


def count_parts(by: ShardedBy) -> tuple[int, int]:
    """Into how many parts batches are divided, and which of them this rank has."""
    mesh, count, index, position = by.plan.mesh, 1, 0, by.plan.mesh.coordinates(by.comm.rank)
    for axis, placement in enumerate(by.plan.input_placements or ()):
        if placement.is_shard(0):
            count, index = count * mesh.shape[axis], index * mesh.shape[axis] + position[mesh.axes[axis]]
    return count, index


def _find_inner(optimizer: Any) -> Any:
    """The optimizer of torch that accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def whole_states(optimizers: Sequence[Any], by: ShardedBy) -> Iterator[None]:
    """Let state dicts of optimizers have whole tensors, on the first rank; every rank enters."""
    hooks = []
    for optimizer in map(_find_inner, optimizers):
        leaves, structure = pytree.tree_flatten(optimizer.state_dict())
        whole = gather_state({str(i): leaf for i, leaf in enumerate(leaves)}, by.comm)
        state = pytree.tree_unflatten([whole.get(str(i)) for i in range(len(leaves))], structure)
        hooks.append(optimizer.register_state_dict_post_hook(lambda *_, state=state: state))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class ShardedTrainer(transformers.Trainer):  # type: ignore[misc]  # no types without transformers
    """`transformers.Trainer` for a model that `shard_module` sharded by a plan with `output_plan="plain"`.

    >>> trainer = ShardedTrainer(model, arguments, train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Trainers that are derived from it, such as those of trl, come after it: `class Sharded(ShardedTrainer, SFTTrainer)`.
    """

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        self.sharded_by = _find_plan(model)
        self._loss = _LossOfRows(count_parts(self.sharded_by)[0])
        model.register_forward_hook(self._loss.note_outputs, with_kwargs=True)
        super().__init__(model, *args, **kwargs)
        # Ranks that compute one batch together draw the same tokens; some trainers give each rank a seed of its own.
        transformers.set_seed(self.args.seed)
        # Skips DistributedDataParallel and calls save_pretrained on every rank; set after the constructor, which
        # refuses to checkpoint optimizers of such models.
        self.is_distributed_loading_by_transformers = True

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator, args = self.accelerator, self.args
        accelerator.__class__, accelerator.sharded_by = ShardedAccelerator, self.sharded_by
        accelerator.dataloader_config.data_seed = args.seed if args.data_seed is None else args.data_seed
        self.gather_function = accelerator.gather_for_metrics

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of evaluation on the rows of the dataset, without those that were added to fill the last batch."""
        state, (_, index) = self.accelerator.gradient_state, count_parts(self.sharded_by)
        if state.end_of_dataloader and state.remainder > 0:
            rows = next(t.shape[0] for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, Tensor) and t.ndim)
            own = min(rows, max(0, state.remainder - index * rows))
            inputs = pytree.tree_map(
                lambda t: t[:own] if isinstance(t, Tensor) and t.ndim and t.shape[0] == rows else t, dict(inputs)
            )
        return super().prediction_step(model, inputs, *args, **kwargs)

    def get_tp_size(self) -> int:
        """How many ranks have the same batch; a loss is multiplied by the number of batches when this is asked."""
        self._loss.is_scaled = True
        return max(1, int(self.accelerator.num_processes) // self._loss.parts)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the whole batch, as every rank has it; or that of this rank's rows, to be averaged over ranks."""
        with self._loss:
            found = super().compute_loss(*args, **kwargs)
            loss = found[0] if isinstance(found, tuple) else found
            if self._loss.is_scaled and not self._loss.reads_rows(loss):
                loss = loss / self._loss.parts
        return (loss, *found[1:]) if isinstance(found, tuple) else loss

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing to do: replicated parameters and their gradients are equal on all ranks."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        made = super().create_optimizer(*args, **kwargs)
        made.register_load_state_dict_post_hook(shard_optimizer_state)
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with whole_states([self.optimizer], self.sharded_by):
            super()._save_optimizer_and_scheduler(output_dir)


class _LossOfRows:
    """Whether a loss is computed from outputs for rows, whose gradients are averaged over the parts of a batch."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.is_scaled = False
        self._running = False
        self._rows: set[Any] = set()
        self._whole: set[Any] = set()

    def __enter__(self) -> None:
        self._running, self.is_scaled = True, False

    def __exit__(self, *error: object) -> None:
        self._running = False
        self._rows, self._whole = set(), set()

    def note_outputs(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """A hook of the model: outputs with as many rows as its inputs are of this rank's rows."""
        if not self._running or self.parts == 1 or not torch.is_grad_enabled():
            return None
        given = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim), None)
        held = given.local_parts[0] if isinstance(given, ShardedTensor) else given
        rows = -1 if held is None else held.shape[0]

        def note(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            own = value.view_as(value)
            if value.ndim and value.shape[0] == rows:
                own.register_hook(lambda gradient: gradient / self.parts)  # type: ignore[no-untyped-call]  # in torch
                self._rows.add(own.grad_fn)
            else:
                self._whole.add(own.grad_fn)
            return own

        return map_nest(note, outputs)

    def reads_rows(self, loss: Tensor) -> bool:
        """Whether the graph of a loss, up to the outputs of the model, has one of rows."""
        seen: set[Any] = set()
        left: list[Any] = [loss.grad_fn]
        while left:
            node = left.pop()
            if node in self._rows:
                return True
            if node is not None and node not in seen and node not in self._whole:
                seen.add(node)
                left += [before for before, _ in node.next_functions]
        return False


def shard_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay whole states (momenta, averages) of an optimizer out like their parameters: after `load_state_dict`."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, ShardedTensor):
            continue
        state.update(shard_state(dict(state), parameter))


def _find_plan(model: Any) -> ShardedBy:
    by = getattr(model, "_sharded_by", None)
    if not isinstance(by, ShardedBy):
        raise PlanError("ShardedTrainer trains a model that shard_module sharded by a ModelPlan; shard it first")
    if by.plan.output_plan is None:
        raise PlanError("ShardedTrainer needs plain losses: write output_plan='plain' in the plan")
    return by
