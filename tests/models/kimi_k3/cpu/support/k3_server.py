# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Starts and stops `vllm serve` as a user does, and keeps what it says."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from tests.models.kimi_k3.cpu.support.k3_engine import ENVIRONMENT, bind

ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--gpu-memory-utilization=0.3",
    "--max-model-len=512",
    "--max-num-seqs=32",
    "--served-model-name=kimi-k3",
)


def serve_command(folder: Path, port: int, *arguments: str) -> list[str]:
    """Command line of a server, from the environment that runs the tests."""
    script = Path(sys.executable).with_name("vllm")
    return [str(script), "serve", str(folder), f"--port={port}", *ARGUMENTS, *arguments]


def environment(ranks: int = 1) -> dict[str, str]:
    """Environment of a server; its engine has processes of its own."""
    own = os.environ | ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": bind(ranks)}
    own["VLLM_LOGGING_LEVEL"] = "INFO"
    del own["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return own


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server(AbstractContextManager):
    """A running server.

    Args:
        folder: the checkpoint.
        log: file for its output.
        arguments: further command line arguments.

    """

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = log
        self.command = serve_command(folder, self.port, *arguments)
        self.exit_code: int | None = None
        self.left_over: list[psutil.Process] = []

    @property
    def url(self) -> str:
        """Base URL for an OpenAI client."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "Server":
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                self.command, env=environment(), stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 180
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-6000:]}")
            time.sleep(0.5)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask the server to stop and see what is left of it; harmless when it has stopped."""
        if self.exit_code is not None:
            return
        family = []
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.exit_code = self.process.wait()
        _, self.left_over = psutil.wait_procs(family, timeout=5)
        for process in self.left_over:
            process.kill()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False
