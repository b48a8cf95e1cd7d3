# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""One process that stands at one rank of a larger parallel layout, without the other processes.

For building a rank's layers and streaming a checkpoint through its loaders: rehearsals, tests.
Collectives return at once and exchange nothing, so no result that crosses ranks means anything.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from kimi_k3.rehearsal.replaced import replaced
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

BACKEND = "kimi_k3_simulated"


class _Done(dist.Work):
    """A collective that is over before it began."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True


class _WithoutPeers(dist.ProcessGroup):
    """A process group whose other ranks do not exist."""

    def getBackendName(self) -> str:
        return BACKEND

    # torch keeps a group's name in its backends, of which this one has none.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def _return_at_once(self, *args: Any, **kwargs: Any) -> _Done:
        return _Done()

    allgather = allreduce = alltoall = barrier = broadcast = gather = _return_at_once
    recv = reduce = reduce_scatter = scatter = send = _return_at_once
    # Of single tensors, by the names of each torch.
    alltoall_base = _allgather_base = _reduce_scatter_base = _return_at_once
    all_gather_single = reduce_scatter_single = all_to_all_single = _return_at_once


# torch keeps its own "fake" backend among its test helpers, which are no API.
dist.Backend.register_backend(
    BACKEND,
    lambda store, rank, size, timeout: _WithoutPeers(rank, size),  # type: ignore[call-arg]
    devices=["cpu", "cuda"],
)


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
    new_group, make_coordinator = dist.new_group, parallel_state.GroupCoordinator.__init__

    def new_simulated_group(ranks: list[int], **kwargs: Any) -> dist.ProcessGroup:
        return new_group(ranks, **{**kwargs, "backend": BACKEND})

    def coordinator_without_peers(self: Any, *args: Any, **kwargs: Any) -> None:
        # Both would wait for processes that do not exist.
        kwargs |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        make_coordinator(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.callback(parallel_state.destroy_distributed_environment)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(set_current_vllm_config(vllm_config or VllmConfig()))
        layout: dict[str, Any] = {
            "rank": rank,
            "world_size": tensor_parallel_size,
            "backend": BACKEND,
        }
        dist.init_process_group(store=HashStore(), **layout)
        with (
            replaced(dist, "new_group", new_simulated_group),
            replaced(parallel_state, "_node_count", lambda group: hosts),
            replaced(parallel_state.GroupCoordinator, "__init__", coordinator_without_peers),
        ):
            parallel_state.init_distributed_environment(local_rank=0, **layout)
            parallel_state.initialize_model_parallel(tensor_parallel_size, backend=BACKEND)
        yield
