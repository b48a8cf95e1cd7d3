# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the KDA amendment changes in vLLM, one name and one constructor, and when it does not."""

import json
import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from vllm.models.kimi_k3.amd import kda
from vllm_overlay import State, activation

# Modules of the projection's neighbourhood: its base classes, the loaders, the other platforms'.
NEIGHBOURS = (
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.model_loader.reload.meta",
    "vllm.model_executor.model_loader.reload.utils",
    "vllm.model_executor.parameter",
    "vllm.models.kimi_k3.amd.kda",
    "vllm.models.kimi_k3.amd.linear",
    "vllm.models.kimi_k3.nvidia.kda",
)

# Applies the one amendment to stock vLLM and compares every name of every loaded vLLM module, and
# every attribute of every class, by identity.
COMPARE = """
import importlib, json, sys
import vllm_overlay
vllm_overlay.activate(amendments=False)
from vllm_overlay import activation
neighbours, missing = {neighbours!r}, []
for name in neighbours:
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(name + ": " + str(error))
import vllm.models.kimi_k3.amd.kda_alignment

def snapshot():
    found = dict()
    for name, module in list(sys.modules.items()):
        if name != "vllm" and not name.startswith("vllm."):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("vllm."):
                for attribute, member in list(vars(value).items()):
                    found[value.__module__, value.__qualname__, attribute] = member
    return found

before = snapshot()
name = "vllm.models.kimi_k3.amd.kda"
activation._apply(name, activation._lay().amendments[name], sys.modules[name])
after = snapshot()
changed = [list(key) for key in before if key not in after or after[key] is not before[key]]
added = [list(key) for key in after if key not in before]
print(json.dumps(dict(changed=changed, added=added, missing=missing, seen=len(before))))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_other_class_of_vllm_is_altered():
    process = python(COMPARE.format(neighbours=NEIGHBOURS), VLLM_KIMI_K3_OVERLAY="0")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["missing"] == []
    assert result["seen"] > 10_000
    name = "vllm.models.kimi_k3.amd.kda"
    assert sorted(result["changed"]) == [
        [name, "KimiK3DeltaAttention", "__init__"],
        [name, "_KimiGDNMergedColumnParallelLinear"],
    ]
    # Whatever is new lies in the amended module: names that it did not have, and one class.
    assert {key[0] for key in result["added"]} == {name}
    classes = {key[1] for key in result["added"] if len(key) == 3}
    assert classes == {"_PaddedKimiGDNMergedColumnParallelLinear"}


@pytest.mark.parametrize(
    ("environment", "active"),
    [
        ({}, True),
        ({"VLLM_PLUGINS": "kimi_k3"}, True),
        ({"VLLM_PLUGINS": "something_else"}, False),
        ({"VLLM_KIMI_K3_OVERLAY": "0"}, False),
    ],
    ids=["default", "named", "filtered_out", "switched_off"],
)
def test_vllm_activates_it_before_any_model_code(environment, active):
    """Without a call of ours: vLLM's own plugin loading, in a process that knows nothing of it."""
    code = """
    import sys
    from vllm.platforms import current_platform
    current_platform.device_type
    import vllm_overlay
    print(vllm_overlay.is_active(), "vllm.models.kimi_k3.amd.kda" in sys.modules)
    """
    process = python(code, **environment)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-2:] == [str(active), "False"]


def test_general_plugins_are_the_safety_net():
    """With an explicit CPU target vLLM skips platform plugins; the module may be loaded before."""
    code = """
    from vllm.models.kimi_k3.amd import kda
    before = kda._KimiGDNMergedColumnParallelLinear.__name__
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    print(before, kda._KimiGDNMergedColumnParallelLinear.__name__)
    """
    process = python(code, VLLM_TARGET_DEVICE="cpu")
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-2:] == [
        "_KimiGDNMergedColumnParallelLinear",
        "_PaddedKimiGDNMergedColumnParallelLinear",
    ]


@pytest.fixture
def stock_module(monkeypatch) -> ModuleType:
    """A copy of upstream's module as it was before the amendment, under its own name."""
    monkeypatch.setattr(activation, "_outcomes", {})
    monkeypatch.setattr(activation, "_refusals", {})
    module = ModuleType(kda.__name__)
    vars(module).update(vars(kda))
    module._KimiGDNMergedColumnParallelLinear = (
        module._PaddedKimiGDNMergedColumnParallelLinear.__base__
    )
    del module._PaddedKimiGDNMergedColumnParallelLinear
    del vars(module)[activation._MARK]
    monkeypatch.setitem(sys.modules, kda.__name__, module)
    return module


def apply(module: ModuleType) -> tuple[State, str, bool]:
    """Amend the module; return state, reason, and whether its namespace changed."""
    before = dict(vars(module))
    activation._apply(module.__name__, activation._lay().amendments[module.__name__], module)
    outcome = activation._outcomes[module.__name__]
    return outcome.state, outcome.reason, vars(module) != before


def test_stock_module_is_amended(stock_module):
    assert apply(stock_module) == (
        State.AMENDED,
        (
            "Online loading of Kimi-K3's merged KDA projection on ROCm: alignment rows are not "
            "waited for."
        ),
        True,
    )


def test_stands_down_where_upstream_has_the_class(stock_module):
    stock_module._PaddedKimiGDNMergedColumnParallelLinear = object
    state, reason, changed = apply(stock_module)
    assert (state, changed) == (State.STOOD_DOWN, False)
    assert "does not wait for its alignment rows" in reason


def test_refuses_without_the_layer(stock_module):
    del stock_module.KimiK3DeltaAttention
    state, reason, changed = apply(stock_module)
    assert (state, changed) == (State.REFUSED, False)
    assert "KimiK3DeltaAttention.__init__: expected the name to exist" in reason


def test_refuses_a_layer_that_builds_its_projection_otherwise(stock_module, monkeypatch):
    def other(self, config, vllm_config, prefix=""):
        self.in_proj_padding = 0

    monkeypatch.setattr(kda.KimiK3DeltaAttention, "__init__", other)
    state, reason, changed = apply(stock_module)
    assert (state, changed) == (State.REFUSED, False)
    assert "expected its code to refer to _KimiGDNMergedColumnParallelLinear" in reason


def test_refuses_a_loader_with_another_signature(stock_module, monkeypatch):
    shared = stock_module._KimiGDNMergedColumnParallelLinear
    monkeypatch.setattr(shared, "weight_loader", lambda self, param: None)
    state, reason, changed = apply(stock_module)
    assert (state, changed) == (State.REFUSED, False)
    assert "missing ['loaded_weight', 'loaded_shard_id']" in reason
