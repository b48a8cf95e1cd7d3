# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Lays the ``vllm/`` tree into the wheel as data of ``vllm_overlay``.

A wheel of ours must never write into the installed vLLM's own folder, so the tree travels as
``vllm_overlay/tree/vllm``. An editable install uses the checkout's tree and copies nothing.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithTree(build_py):
    """The standard step, and then the overlay tree beside the package's own modules."""

    def _tree_files(self) -> dict[str, str]:
        target = Path(self.build_lib) / "vllm_overlay" / "tree"
        return {
            str(target / file.relative_to(ROOT)): str(file)
            for file in sorted((ROOT / "vllm").rglob("*"))
            if file.suffix == ".py"
        }

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for target, source in self._tree_files().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *self._tree_files()]

    def get_source_files(self) -> list[str]:
        tree = [str(Path(source).relative_to(ROOT)) for source in self._tree_files().values()]
        return [*super().get_source_files(), *tree]


setup(cmdclass={"build_py": BuildWithTree})
