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
from types import ModuleType
from typing import Any

from vllm_overlay.tree import NOT_INSTALLED, PACKAGE, overlay_root, upstream_root

_COMMAND_LINE = f"{PACKAGE}.entrypoints.kimi_k3"


class _Deferred(ModuleType):
    """A package in `sys.modules` that runs when something of it is used.

    `importlib.util.LazyLoader` runs it as soon as the import system looks at its ``__spec__``,
    which it does for every nested import. Here only ``__path__``, without which no submodule is
    found, and the package's own names count as use. Where the package is not installed, use is an
    error that says so.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if spec is None or spec.loader is None:
            # Tools that look through all modules ask each for the likes of `__file__`.
            if name.startswith("__") and name != "__path__":
                raise AttributeError(name)
            raise ModuleNotFoundError(NOT_INSTALLED, name=PACKAGE)
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = list(spec.submodule_search_locations or [])
        spec.loader.exec_module(self)
        return getattr(self, name)


def _deferred() -> ModuleType:
    spec = importlib.util.find_spec(PACKAGE) if upstream_root() is not None else None
    module = ModuleType(PACKAGE) if spec is None else importlib.util.module_from_spec(spec)
    vars(module).pop("__path__", None)
    module.__class__ = _Deferred
    return module


def load(name: str) -> ModuleType:
    """A module of the command line's package, in a process that need not import vLLM."""
    if _COMMAND_LINE not in sys.modules:
        if PACKAGE not in sys.modules:
            sys.modules[PACKAGE] = _deferred()
        folder = overlay_root().joinpath(*_COMMAND_LINE.split(".")[1:])
        spec = importlib.util.spec_from_file_location(
            _COMMAND_LINE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"{folder} holds no command line", name=_COMMAND_LINE)
        package = importlib.util.module_from_spec(spec)
        sys.modules[_COMMAND_LINE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_COMMAND_LINE}.{name}")


def main() -> None:
    """Run the command line of the overlay tree."""
    command_line = load("cli")
    try:
        command_line.main()
    except ModuleNotFoundError as error:
        if error.name == PACKAGE:
            sys.exit(f"error: {error}")
        if error.name == "torch":
            sys.exit("error: this command needs torch, which comes with vLLM and is not installed")
        raise
