# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The import contracts hold for this tree, and each of them notices what it is there for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECTION = "A package imports only the packages below it"
CIRCLES = "No circle of imports within a package"

TREE = {
    "vllm_overlay/tree.py": "",
    "mxfp4_int4/definition.py": "",
    "k3_checkpoint/spec.py": "import mxfp4_int4.definition\n",
    # Not the installed vLLM: a folder without __init__.py, with names that upstream lacks.
    "vllm/config/vllm.py": "from vllm.models.kimi_k3 import serving\n",
    "vllm/models/kimi_k3/serving.py": "import k3_checkpoint.spec\nimport vllm.config\n",
    "kimi_k3/cli/main.py": "from kimi_k3.convert import work\n",
    "kimi_k3/convert/work.py": "import vllm.models.kimi_k3.serving\n",
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/lint_imports.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def build(root: Path, files: dict[str, str]) -> Path:
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_tree_keeps_its_contracts():
    process = lint(ROOT)
    assert process.returncode == 0, process.stdout + process.stderr


def test_a_tree_that_keeps_them_passes(tmp_path):
    process = lint(build(tmp_path, TREE))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("file", "text", "contract"),
    [
        ("mxfp4_int4/definition.py", "import vllm.models.kimi_k3.serving", DIRECTION),
        ("mxfp4_int4/definition.py", "import k3_checkpoint.spec", DIRECTION),
        ("mxfp4_int4/definition.py", "import vllm_overlay.tree", DIRECTION),
        ("vllm_overlay/tree.py", "import mxfp4_int4.definition", DIRECTION),
        ("k3_checkpoint/spec.py", "import kimi_k3.convert.work", DIRECTION),
        ("vllm/models/kimi_k3/serving.py", "import kimi_k3.convert.work", DIRECTION),
        ("k3_checkpoint/spec.py", "import vllm_overlay.tree", "knows nothing of the overlay"),
        ("kimi_k3/convert/more.py", "import kimi_k3.cli.main", "Nothing imports the command line"),
        ("kimi_k3/convert/work.py", "import kimi_k3.cli.main", CIRCLES),
        ("vllm/models/kimi_k3/serving.py", "def f():\n    import vllm.config.vllm", CIRCLES),
    ],
)
def test_each_contract_notices(tmp_path, file, text, contract):
    process = lint(build(tmp_path, {**TREE, file: f"{text}\n"}))
    assert process.returncode == 1
    assert contract in process.stdout.partition("Broken contracts")[2], process.stdout
