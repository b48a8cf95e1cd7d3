# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Takes back what an amendment did to a module: its names, classes and containers."""

from collections.abc import Callable
from typing import Any

_Undo = Callable[[], None]


def remember(namespace: dict[str, Any]) -> _Undo:
    """Return a function that restores a module's namespace as it is now.

    Restored are its names, the attributes of the classes among them, wherever these were defined,
    and the items of its dictionaries, lists and sets.
    """
    names = dict(namespace)
    undo: list[_Undo] = []
    for value in names.values():
        if isinstance(value, type):
            undo.append(_remember_class(value))
        elif type(value) in (dict, list, set):
            undo.append(_remember_container(value))

    def restore() -> None:
        for step in undo:
            step()
        for name in namespace.keys() - names.keys():
            del namespace[name]
        namespace.update(names)

    return restore


def _remember_class(cls: type) -> _Undo:
    before = dict(vars(cls))

    def restore() -> None:
        # By `type` itself: a metaclass such as Enum's refuses to have its members set.
        for name in vars(cls).keys() - before.keys():
            type.__delattr__(cls, name)
        for name, value in before.items():
            if vars(cls).get(name) is not value:
                type.__setattr__(cls, name, value)

    return restore


def _remember_container(container: Any) -> _Undo:
    before = container.copy()

    def restore() -> None:
        if type(container) is list:
            container[:] = before
        else:
            container.clear()
            container.update(before)

    return restore
