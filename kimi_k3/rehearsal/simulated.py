# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One process that stands at one rank of a larger parallel layout, without the other processes.

For building a rank's layers and streaming a checkpoint through its loaders: rehearsals, tests.
Collectives return at once and exchange nothing, so no result that crosses ranks means anything.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state


@contextmanager
def simulated_parallel(
    vllm_config: VllmConfig | None = None,
    *,
    tensor_parallel_size: int,
    rank: int,
    hosts: int = 1,
) -> Iterator[None]:
    """Let vLLM believe, within the context, that this process is `rank` of a running layout.

    Args:
        vllm_config: Configuration in force while the groups are made; a default one if None.
        tensor_parallel_size: Number of ranks in the one tensor-parallel group.
        rank: This process's place in it, 0 .. tensor_parallel_size - 1.
        hosts: Machines that vLLM finds the ranks spread over.

    Raises:
        ValueError: `rank` lies outside the layout.
        RuntimeError: This process already belongs to a distributed layout.
    """
    if not 0 <= rank < tensor_parallel_size:
        raise ValueError(
            f"rank {rank} lies outside a layout of {tensor_parallel_size}: "
            f"expected 0 to {tensor_parallel_size - 1}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "this process already belongs to a distributed layout; a simulated one needs a process "
            "of its own"
        )
    new_group = dist.new_group

    def new_fake_group(ranks: list[int], **kwargs: Any) -> dist.ProcessGroup:
        return new_group(ranks, **{**kwargs, "backend": "fake"})

    def coordinator_without_peers(self, *args, **kwargs) -> None:
        # Both would wait for processes that do not exist.
        kwargs |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        coordinator_init(self, *args, **kwargs)

    coordinator_init = parallel_state.GroupCoordinator.__init__
    with ExitStack() as stack:
        stack.callback(parallel_state.destroy_distributed_environment)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(set_current_vllm_config(vllm_config or VllmConfig()))
        dist.init_process_group(
            backend="fake", store=FakeStore(), rank=rank, world_size=tensor_parallel_size
        )
        with (
            mock.patch.object(dist, "new_group", new_fake_group),
            mock.patch.object(parallel_state, "_node_count", return_value=hosts),
            mock.patch.object(
                parallel_state.GroupCoordinator, "__init__", coordinator_without_peers
            ),
        ):
            parallel_state.init_distributed_environment(
                world_size=tensor_parallel_size, rank=rank, local_rank=0, backend="fake"
            )
            parallel_state.initialize_model_parallel(tensor_parallel_size, backend="fake")
        yield
