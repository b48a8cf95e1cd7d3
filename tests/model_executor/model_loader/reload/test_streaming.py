# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""vLLM's streaming iterators, any order of tensors: no source outlives its layer's completion."""

import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm.model_executor.model_loader.reload import (
    accounting,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import (
    multi_thread_safetensors_weights_iterator,
    safetensors_weights_iterator,
)
from vllm.model_executor.models.utils import AutoWeightsLoader

LAYERS, ROWS, COLUMNS = 3, 6, 4
Weights = Iterator[tuple[str, torch.Tensor]]


def names(order: str) -> list[str]:
    """Tensor names so that layers complete one by one, all at the end, or in any order."""
    by_layer = [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("weight", "bias")]
    if order == "layer by layer":
        return by_layer
    if order == "interleaved":
        return by_layer[::2] + by_layer[1::2]
    random.Random(0).shuffle(by_layer)
    return by_layer


def lazy(files: list[str]) -> Weights:
    return safetensors_weights_iterator(files, use_tqdm_on_load=False)


def eager(files: list[str]) -> Weights:
    return safetensors_weights_iterator(files, False, safetensors_load_strategy="eager")


def threaded(files: list[str]) -> Weights:
    return multi_thread_safetensors_weights_iterator(files, False, max_workers=2)


def fast(files: list[str]) -> Weights:
    """The library as vLLM drives it, without GPU Direct Storage, into host memory."""
    pytest.importorskip("fastsafetensors")
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    loader = ParallelLoader(
        pg=SingleGroup(),
        hf_weights_files=files,
        queue_size=0,
        use_tqdm_on_load=False,
        device="cpu",
        nogds=True,
    )
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()


def write(folder: Path, order: list[str], expected: dict[str, torch.Tensor]) -> list[str]:
    """Write one tensor a file, so that the files' order is the tensors'."""
    files = []
    for position, name in enumerate(order):
        file = folder / f"model-{position:05d}.safetensors"
        save_file({name: expected[name]}, file)
        files.append(str(file))
    return files


def observed(weights: Weights, model: nn.Module, alive: list[int]) -> Weights:
    """Hand on weights; before each one check that all sources of complete layers are gone.

    All but the one handed on last: upstream's chain of generators (a mapper, a filter, a grouping)
    has it in its hands until the next one comes.
    """
    references: dict[str, weakref.ref] = {}

    def check(last: str) -> None:
        for name, reference in references.items():
            complete = not model.get_submodule(name.rpartition(".")[0]).weight.is_meta
            if name != last:
                assert (reference() is None) is complete, name
        alive.append(sum(r() is not None for name, r in references.items() if name != last))

    for name, tensor in weights:
        references[name] = weakref.ref(tensor)
        yield name, tensor
        del tensor
        check(name)


@pytest.mark.parametrize("order", ["layer by layer", "interleaved", "shuffled"])
@pytest.mark.parametrize("iterator", [lazy, eager, threaded, fast])
def test_no_source_outlives_its_layer(
    load, tmp_path, iterator: Callable[[list[str]], Weights], order
):
    expected = {name: torch.randn(load.model.get_parameter(name).shape) for name in names(order)}
    files = write(tmp_path, names(order), expected)
    alive: list[int] = []
    load.model.load_weights(observed(iterator(files), load.model, alive))
    assert alive[-1] == 0
    assert load.account.held.host == 0
    # One of the sources held is the last one, which is not counted.
    most = {"layer by layer": 0, "interleaved": LAYERS - 1, "shuffled": max(alive)}
    if iterator is not threaded:  # which hands out files as they are read
        assert max(alive) == most[order]
    load.finish()
    for name, tensor in expected.items():
        assert torch.equal(load.model.get_parameter(name), tensor)


class Experts(nn.Module):
    """Two local experts of four, as expert parallelism leaves them, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(COLUMNS, 4, bias=False)
        self.mlp.experts = nn.ModuleDict(
            {str(i): nn.Linear(COLUMNS, ROWS, bias=False) for i in (1, 3)}
        )


@pytest.mark.usefixtures("asked_for")
def test_filtered_experts_are_neither_read_nor_held(tmp_path):
    model = Experts()
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    tensors = {"mlp.gate.weight": torch.randn(4, COLUMNS)}
    for expert in range(4):
        tensors[f"mlp.experts.{expert}.weight"] = torch.randn(ROWS, COLUMNS)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = safetensors_weights_iterator(
        [str(tmp_path / "model.safetensors")], False, local_expert_ids={1, 3}
    )
    AutoWeightsLoader(model).load_weights(weights)
    summary = accounting.current().summary()
    assert (summary.wrapped, summary.completed_early, summary.sources) == (3, 3, 3)
    assert not accounting.current().held
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name])
