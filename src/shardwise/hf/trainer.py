"""The Trainer of transformers for a model that is sharded by a plan: its loop, arguments and files, unchanged.

What differs: batches are divided over the axes that split inputs and are the same along all others, the model is not
wrapped in DistributedDataParallel, and every rank takes part in saving, of which one writes whole tensors.

A model's own loss is that of the whole batch, on every rank. A loss that is computed from outputs (label smoothing,
`compute_loss_func`, the trainers of trl, which come after ShardedTrainer among the bases) is one of this rank's rows,
of which such code expects the average over ranks: the gradients of rows are divided by the number of parts of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise._tree import map_nest
from shardwise.nn.inputs import ShardedBy, batch_placements, gather_state, place_inputs
from shardwise.nn.optimizer import shard_state
from shardwise.nn.plan import PlanError
from shardwise.tensor.sharded_tensor import ShardedTensor


class ShardedTrainer(transformers.Trainer):  # type: ignore[misc]  # no types without transformers
    """`transformers.Trainer` for a model that `shard_module` sharded by a plan with `output_plan="plain"`.

    >>> trainer = ShardedTrainer(model, arguments, train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Trainers that are derived from it, such as those of trl, come after it: `class Sharded(ShardedTrainer, SFTTrainer)`.
    """

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        self.sharded_by = _find_plan(model)
        self._loss = _LossOfRows(self._data_ranks()[0])
        model.register_forward_hook(self._loss.note_outputs, with_kwargs=True)
        super().__init__(model, *args, **kwargs)
        # Ranks that compute one batch together draw the same tokens; some trainers give each rank a seed of its own.
        transformers.set_seed(self.args.seed)
        # Skips DistributedDataParallel and calls save_pretrained on every rank; set after the constructor, which
        # refuses to checkpoint optimizers of such models.
        self.is_distributed_loading_by_transformers = True

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.accelerator.gather_for_metrics = self.gather_function = self._gather_rows

    def _data_ranks(self) -> tuple[int, int]:
        """Into how many parts batches are divided, and which of them this rank has."""
        mesh, comm = self.sharded_by.plan.mesh, self.sharded_by.comm
        placements = self.sharded_by.plan.input_placements or ()
        count, index, position = 1, 0, mesh.coordinates(comm.rank)
        for axis, placement in enumerate(placements):
            if placement.is_shard(0):
                count, index = count * mesh.shape[axis], index * mesh.shape[axis] + position[mesh.axes[axis]]
        return count, index

    def _prepare_data_loader(self, loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        accelerator, (count, index) = self.accelerator, self._data_ranks()
        made = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=count,
            process_index=index,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=[],  # each rank draws the same order from the seed
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(made)
        return made

    def _gather_rows(self, tree: Any, use_gather_object: bool = False) -> Any:
        """The rows of all ranks with other batches, without those that were added to fill the last batch.

        Of numbers (a count, a sum) there is one for each batch.
        """
        plan, state = self.sharded_by.plan, self.accelerator.gradient_state
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

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of evaluation on the rows of the dataset, without those that were added to fill the last batch."""
        state, (_, index) = self.accelerator.gradient_state, self._data_ranks()
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
        return max(1, int(self.accelerator.num_processes) // self._data_ranks()[0])

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
        own: Any = self.optimizer  # type: ignore[has-type]  # set by the Trainer
        self.optimizer = _WholeState(own, self.sharded_by)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = own


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


class _WholeState:
    """Stands for an optimizer whose state is written whole."""

    def __init__(self, optimizer: Any, by: ShardedBy) -> None:
        leaves, structure = pytree.tree_flatten(optimizer.state_dict())
        whole = gather_state({str(i): leaf for i, leaf in enumerate(leaves)}, by.comm)
        self._state = pytree.tree_unflatten([whole.get(str(i)) for i in range(len(leaves))], structure)

    def state_dict(self) -> Any:
        return self._state


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
