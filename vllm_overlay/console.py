# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The console script: finds the command line in the overlay tree and hands over to it.

The command line belongs to ``vllm.entrypoints``, but to import it by that name would run vLLM's own
``__init__``, and torch with it, before a word of help is printed. So its package is loaded from its
file, under its own name, and vLLM's top package is put off until something of it is used.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_overlay.tree import PACKAGE, overlay_root, upstream_root

_COMMAND_LINE = f"{PACKAGE}.entrypoints.kimi_k3"


class _Deferred(ModuleType):
    """A package in `sys.modules` that runs when the first of its attributes is asked for.

    `importlib.util.LazyLoader` runs it as soon as the import system looks at its ``__spec__``,
    which it does for every nested import. Here only ``__path__``, without which no submodule is
    found, and the package's own names count as use.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = list(spec.submodule_search_locations or [])
        spec.loader.exec_module(self)
        return getattr(self, name)


def _defer(spec: ModuleSpec) -> None:
    module = importlib.util.module_from_spec(spec)
    del module.__path__
    module.__class__ = _Deferred
    sys.modules[spec.name] = module


def main() -> None:
    """Run the command line of the overlay tree."""
    upstream = importlib.util.find_spec(PACKAGE)
    if upstream is not None and upstream.loader is not None and upstream_root() is not None:
        _defer(upstream)
    folder = overlay_root().joinpath(*_COMMAND_LINE.split(".")[1:])
    spec = importlib.util.spec_from_file_location(
        _COMMAND_LINE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{folder} holds no command line", name=_COMMAND_LINE)
    package = importlib.util.module_from_spec(spec)
    sys.modules[_COMMAND_LINE] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{_COMMAND_LINE}.cli").main()
