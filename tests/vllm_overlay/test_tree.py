# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The comparison of two trees by their files, and the versions that count as tested."""

from pathlib import Path

import pytest

from vllm_overlay.tree import compare, is_tested, overlay_root, upstream_version


def lay_out(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    return root


def test_compare(tmp_path):
    upstream = lay_out(
        tmp_path / "up", "__init__.py", "a/__init__.py", "a/b.py", "a/pack/__init__.py", "bare/x.py"
    )
    overlay = lay_out(
        tmp_path / "over",
        "a/__init__.py",
        "a/b.py",
        "a/pack/new.py",
        "a/fresh/deep/leaf.py",
        "a/pack.py",
        "bare/new.py",
        "top.py",
    )
    tree = compare(overlay, upstream)
    assert tree.amendments == {
        "vllm.a": overlay / "a/__init__.py",
        "vllm.a.b": overlay / "a/b.py",
        # Upstream has it as a package, the overlay as a file: the same module.
        "vllm.a.pack": overlay / "a/pack.py",
    }
    assert set(tree.new_modules) == {
        "vllm.a.pack.new",
        "vllm.a.fresh.deep.leaf",
        "vllm.bare.new",
        "vllm.top",
    }
    assert tree.extended == {
        "vllm": overlay,
        "vllm.a": overlay / "a",
        "vllm.a.pack": overlay / "a/pack",
    }


def test_an_amendment_without_a_target_is_no_new_module(tmp_path):
    upstream = lay_out(tmp_path / "up", "__init__.py")
    overlay = lay_out(tmp_path / "over", "new.py", "gone.py")
    (overlay / "gone.py").write_text('"""Amends.\n\nLedger\n    What: x\n"""\n')
    tree = compare(overlay, upstream)
    assert tree.lost == {"vllm.gone": overlay / "gone.py"}
    assert tree.new_modules == {"vllm.new": overlay / "new.py"}


def test_the_tree_stays_a_namespace():
    """An `__init__.py` of ours above a new package would hide the installed vLLM's."""
    root = overlay_root()
    assert not (root / "__init__.py").exists()
    assert not (root / "model_executor" / "__init__.py").exists()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5+cpu", "0.33.1.dev4+g1a2b3c.rocm700"])
def test_tested_versions(version):
    assert is_tested(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "unknown", ""])
def test_untested_versions(version):
    assert not is_tested(version)


def test_version_is_read_without_an_import(tmp_path):
    (tmp_path / "_version.py").write_text(
        "raise RuntimeError('imported')\n__version__: str\n__version__ = version = '0.33.0+rocm'\n"
    )
    assert upstream_version(tmp_path) == "0.33.0+rocm"
