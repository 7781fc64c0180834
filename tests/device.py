"""On which device do the tests run? With SHARDWISE_TEST_DEVICE=cuda the same tests make their tensors on the GPU, and
with SHARDWISE_TEST_DEVICE=standin on a device in host memory that stands in for one (`tests/standin_device`).

Importing this sets torch's default device, in the test process and in the ranks that it spawns, which import it too.
"""

from __future__ import annotations

import os
import shutil
import warnings
from fnmatch import fnmatch

import torch
from torch import Tensor

CPU_FILES = {
    "test_device_engine.py": "host memory stands in for a device",
    "test_device_trust.py": "host memory stands in for a device",
    "test_device_moves.py": "host memory stands in for a device",
    "test_bench.py": "the benchmarks choose their devices themselves",
    "test_op_db.py": "samples of torch's tests are made for the CPU",
    "test_op_db_page.py": "samples of torch's tests are made for the CPU",
    "test_op_db_values.py": "samples of torch's tests are made for the CPU",
    "test_fidelity_*.py": "torch's own sharded tensors beside ours, placed on the CPU of gloo's ranks",
    "test_side_by_side.py": "torch's own sharded tensors beside ours, placed on the CPU of gloo's ranks",
}
"""Test files (patterns) that are about the CPU alone, with the reason."""

OUT_OF_RANGE = "an index out of range ends a process's use of the GPU"
CPU_TESTS = {
    "test_ids_that_no_rank_has_are_an_error_of_the_graph_on_every_rank": OUT_OF_RANGE,
    "test_targets_out_of_bounds": OUT_OF_RANGE,
    "test_indices_that_no_rank_holds_are_refused": OUT_OF_RANGE,
    "test_a_mistake_in_a_cut_index": OUT_OF_RANGE,
    "test_two_kills_lose_nothing": "saves are killed in forks, in which CUDA cannot be used; it is about files alone",
}
"""Tests that are about the CPU alone, or would end those after them, with the reason."""

STANDIN_TESTS = {
    "test_inductor_compiles_a_training_step": "inductor makes no code for the stand-in",
}
"""Tests that a GPU can run and the stand-in cannot, with the reason."""

CPU_ERRORS = {
    "device type for generator but found 'cpu'": "draws its values from a generator of the CPU",
    "device type tensor to numpy": "compares through NumPy, which knows host memory alone",
    "No backend type associated with device type standin": "torch's own collectives do not know the stand-in",
    "Torch not compiled with CUDA enabled": "torch takes gloo's device for CUDA, not for the stand-in",
    "`fused=True` requires all the params": "torch has no fused form of this optimizer for the device",
}
"""What torch says where a test does something that only host tensors can, with the reason for which it is skipped."""

DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "cpu")
STANDIN = "standin"


def load_device(rank: int) -> None:
    """Importing this is what makes the device known; spawned ranks call it when they start."""


def skip_reason(file: str, test: str) -> str | None:
    """Why a test is skipped on a device, or None."""
    if DEVICE == STANDIN and not can_build():
        return "the stand-in device is compiled, and there is no C++ compiler or no ninja"
    tests = CPU_TESTS | STANDIN_TESTS if DEVICE == STANDIN else CPU_TESTS
    return next((r for pattern, r in CPU_FILES.items() if fnmatch(file, pattern)), tests.get(test.split("[")[0]))


def cpu_reason(failure: str) -> str | None:
    """Why a test that failed on a device is one for the CPU, or None; what fails inside of the library is no reason."""
    if DEVICE == "cpu" or failure.rfind("src/shardwise/") > failure.rfind("tests/"):
        return None
    return next((reason for text, reason in CPU_ERRORS.items() if text in failure), None)


def can_build() -> bool:
    """Whether this machine has what torch compiles extensions with."""
    return all(map(shutil.which, (os.environ.get("CXX", "c++"), "ninja")))


if DEVICE == STANDIN and can_build():
    from tests.standin_device import register_standin

    register_standin(STANDIN)
    torch.set_default_device(DEVICE)
elif DEVICE not in ("cpu", STANDIN):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated for set_default_device, a mode of one thread; ranks may be threads
        torch.set_default_tensor_type("torch.cuda.FloatTensor")


def renorm_on_host(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """`torch.embedding_renorm_` as host memory has it, for plain tables to compare with.

    The kernel for GPUs fails where there are no ids, and knows norms of types 1 and 2 only: an infinite one is 1.
    """
    if type(table) not in (Tensor, torch.nn.Parameter):
        return _embedding_renorm(table, ids, max_norm, norm_type)
    host = table.detach().cpu()
    return table.copy_(_embedding_renorm(host, ids.cpu(), max_norm, norm_type))


_embedding_renorm = torch.embedding_renorm_

PLACE = str(torch.empty(0).device)
"""The device as torch's placements name it: "cpu", "cuda:0"."""
