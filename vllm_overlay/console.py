# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The console script: finds the command line in the overlay tree and hands over to it.

The command line belongs to ``vllm.entrypoints``, but to import it by that name would run vLLM's own
``__init__``, and torch with it, before a word of help is printed. So its package is loaded from its
file, under its own name; its commands import vLLM when they need it.
"""

import importlib.util
import sys

from vllm_overlay.tree import overlay_root

_COMMAND_LINE = "vllm.entrypoints.kimi_k3"


def main() -> None:
    """Run the command line of the overlay tree."""
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
