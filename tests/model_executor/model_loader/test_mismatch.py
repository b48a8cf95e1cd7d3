# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A vLLM in which the names that only diagnostics need are gone still serves every model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RENAMED = {
    "model_executor/model_loader/reload/layerwise.py": {
        "_wrap_parameters_weight_loader": "_wrap_loaders",
        "SKIP_LOAD_TENSORS": "NOT_LOADED",
    },
    "model_executor/model_loader/reload/meta.py": {"SKIP_LOAD_TENSORS": "NOT_LOADED"},
    "model_executor/model_loader/reload/utils.py": {"SKIP_LOAD_TENSORS": "NOT_LOADED"},
    "model_executor/models/utils.py": {"base_prefix": "start"},
}

LOAD = """
import torch, vllm_overlay
from types import SimpleNamespace
from torch import nn
vllm_overlay.general_plugin()
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader
model = nn.Sequential(nn.Linear(2, 2))
reload.record_metadata_for_reloading(model)
reload.initialize_layerwise_reload(model)
weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
AutoWeightsLoader(model).load_weights(iter(weights.items()))
reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
import vllm.models.kimi_k3.amd.kda
for outcome in vllm_overlay.outcomes():
    print(outcome.state.value, outcome.module)
"""


def linked_copy(source: Path, target: Path, edits: dict[str, dict[str, str]]) -> None:
    """Lay links to a package's files, and real files where names in them are replaced."""
    target.mkdir()
    for entry in source.iterdir():
        below = {
            name.partition("/")[2]: edit
            for name, edit in edits.items()
            if name.partition("/")[0] == entry.name
        }
        if not below:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            linked_copy(entry, target / entry.name, below)
        else:
            text = entry.read_text()
            for name, other in below[""].items():
                assert name in text
                text = text.replace(name, other)
            (target / entry.name).write_text(text)


@pytest.mark.slow
def test_diagnostics_stand_down_and_refuse_nobody(tmp_path):
    import vllm

    linked_copy(Path(vllm.__file__).parent, tmp_path / "vllm", RENAMED)
    process = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    states = dict(
        line.rsplit(" ", 1)[::-1] for line in process.stdout.splitlines()[-60:] if " vllm." in line
    )
    loader = "vllm.model_executor.model_loader"
    for module in (f"{loader}.reload.layerwise", f"{loader}.base_loader"):
        assert states[module] == "stood down"
    assert states["vllm.model_executor.models.utils"] == "stood down"
    assert states["vllm.models.kimi_k3.amd.kda"] == "amended"
    assert "refused" not in states.values()
