# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Shards as tasks of a local Ray cluster, and what is said where there is none."""

import builtins
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from kimi_k3.convert import (
    ConversionFailed,
    ConvertOptions,
    convert_checkpoint,
)
from tests.kimi_k3.convert.support.files import digests


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """Two cores of this machine; it belongs to this process and ends with it."""
    # Sockets have short names, and pytest's folders long ones.
    folder = tmp_path_factory.getbasetemp().parent / f"ray{os.getpid()}"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_the_same_files_and_the_same_errors(cluster, source, result, tmp_path):
    script = Path(sys.executable).with_name("kimi-k3")
    command = [script, "convert", source, tmp_path / "out", "--ray"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "4 of 4 shards converted" in process.stdout
    assert digests(tmp_path / "out") == digests(result)
    # What a task finds wrong comes back by name.
    shard = tmp_path / "out" / "model-00003-of-000004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    process = subprocess.run([*command, "--verify"], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert f"{shard.name}: SHA-256 of the result" in process.stderr


def test_without_ray_it_says_what_to_install(source, tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConversionFailed, match=r"pip install 'vllm-kimi-k3\[ray\]'"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(ray=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_without_a_cluster_it_says_how_to_start_one(source, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConversionFailed, match=r"found none running here.*ray start --head"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(ray=True))
    assert not (tmp_path / "out").exists()
