"""On which device do the tests run? With SHARDWISE_TEST_DEVICE=cuda the same tests make their tensors on the GPU.

Importing this sets torch's default device, in the test process and in the ranks that it spawns, which import it too.
"""

from __future__ import annotations

import os
import warnings

import torch

DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "cpu")

if DEVICE != "cpu":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated for set_default_device, a mode of one thread; ranks may be threads
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
