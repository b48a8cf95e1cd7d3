# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What an amendment may do to a module before it fails, taken back."""

import enum
from types import ModuleType

import pytest

from vllm_overlay.undo import remember


class Color(enum.Enum):
    RED = 1


@pytest.fixture
def module() -> ModuleType:
    """A module with a name, a class, an enumeration and containers."""

    class Layer:
        size = 1

        def forward(self) -> str:
            return "upstream"

    made = ModuleType("upstream")
    made.Layer, made.Color, made.LIMIT = Layer, Color, 3
    made.REGISTRY, made.NAMES, made.KNOWN = {"a": 1}, ["a", "b"], {"a"}
    return made


def test_names_are_restored(module):
    restore = remember(vars(module))
    module.LIMIT, module.EXTRA = 4, "new"
    del module.NAMES
    restore()
    assert module.LIMIT == 3
    assert module.NAMES == ["a", "b"]
    assert not hasattr(module, "EXTRA")


def test_attributes_of_classes_are_restored(module):
    layer, forward = module.Layer, module.Layer.forward
    restore = remember(vars(module))
    layer.forward = lambda self: "ours"
    layer.size, layer.added = 2, True
    restore()
    assert layer.forward is forward
    assert layer().forward() == "upstream"
    assert layer.size == 1
    assert not hasattr(layer, "added")


def test_an_enumeration_keeps_its_members(module):
    restore = remember(vars(module))
    module.Color.described = property(lambda self: self.name)
    restore()
    assert not hasattr(Color.RED, "described")
    assert Color(1) is Color.RED


def test_containers_are_restored_in_place(module):
    registry, names, known = module.REGISTRY, module.NAMES, module.KNOWN
    restore = remember(vars(module))
    registry.update(a=2, b=3)
    names.append("c")
    known.clear()
    restore()
    assert registry == {"a": 1}
    assert names == ["a", "b"]
    assert known == {"a"}
    assert module.REGISTRY is registry
    assert module.NAMES is names
    assert module.KNOWN is known
