# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Lays the ``vllm/`` tree into the wheel as data of ``vllm_overlay``, and compiles the CPU code.

A wheel of ours must never write into the installed vLLM's own folder, so the tree travels as
``vllm_overlay/tree/vllm``. An editable install uses the checkout's tree and copies nothing.
Without a C compiler the package is installed without the extension and works without it.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
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


# Nothing here or in the environment may change a value: no -ffast-math, which would also put every
# thread of the process into flush-to-zero, and no fused multiply-add. native.c has versions of its
# own for newer CPUs.
FLAGS = ["-std=c11", "-O3", "-fPIC", "-fno-fast-math", "-ffp-contract=off"]
BASELINE = {"x86_64": ["-msse4.2"]}


class BuildNative(build_ext):
    """The standard step by the environment's compiler, but not with the environment's flags."""

    def build_extensions(self) -> None:
        words = shlex.split(os.environ.get("CC", ""))
        compiler = [word for word in words if not word.startswith("-")] or ["cc"]
        flags = FLAGS + BASELINE.get(os.uname().machine, [])
        self.compiler.set_executables(
            compiler_so=[*compiler, *flags], linker_so=[*compiler, "-shared"]
        )
        # The numbers of mxfp4_int4.definition, which alone states them.
        command = [sys.executable, "-m", "mxfp4_int4.native_numbers"]
        environment = {**os.environ, "PYTHONSAFEPATH": ""}  # -m finds the sources in `cwd`
        header = subprocess.check_output(command, cwd=ROOT, env=environment)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        (Path(self.build_temp) / "native_numbers.h").write_bytes(header)
        self.include_dirs = self.compiler.include_dirs = [self.build_temp]
        self.force = True  # objects of an earlier build may be of other numbers
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildNative, "build_py": BuildWithTree},
    ext_modules=[Extension("mxfp4_int4._native", ["mxfp4_int4/native.c"], optional=True)],
)
