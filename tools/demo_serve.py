# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Kimi-K3 served on this machine, end to end: checkpoint, `vllm serve`, the openai client.

    python tools/demo_serve.py

Writes a tiny checkpoint with random weights (so the answers are babble), starts a real server on
it, sends a completion and a chat request, streams, prints what happened and stops the server. Needs
the environment that tools/cpu_env.py builds; no GPU, no download.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MODEL = "kimi-k3"
START_SECONDS = 180
STOP_SECONDS = 30
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Layers this small gain nothing from more threads.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The few functions that upstream compiles take longer to compile than this demo takes.
    "TORCHDYNAMO_DISABLE": "1",
}
ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--gpu-memory-utilization=0.3",
    f"--served-model-name={MODEL}",
)
# Lines of the server's log that say what it is doing, in the words of the demo.
STAGES = {
    "Starting to load model": "loading the checkpoint",
    "Explicitly set": "allocating the cache",
    "Starting vLLM": "opening the port",
}

console = Console()


def script(name: str) -> str:
    """Path of a console script of the running environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise SystemExit(
            f"{path} is not there: build the environment with tools/cpu_env.py and run this file "
            "with its python"
        )
    return str(path)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, port: int, log: Path) -> None:
    """Show what the server is doing until it answers; end the demo if it does not."""
    deadline = time.monotonic() + START_SECONDS
    with console.status("starting vllm serve: importing vLLM") as status:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                break
            text = log.read_text(errors="replace")
            for line, stage in STAGES.items():
                if line in text:
                    status.update(f"starting vllm serve: {stage}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
    tail = log.read_text(errors="replace")[-4000:]
    raise SystemExit(f"the server did not get ready; the end of its log:\n{tail}")


def converse(port: int, results: Table) -> None:
    """Send a completion and a chat request; stream both."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    console.print(f"model served: [bold]{client.models.list().data[0].id}[/]")
    for kind in ("completion", "chat"):
        start, first, tokens = time.perf_counter(), 0.0, 0
        console.print(f"\n[bold]{kind}[/], streamed: ", end="")
        fixed = {"model": MODEL, "max_tokens": 32, "temperature": 0.0, "stream": True}
        if kind == "completion":
            parts = client.completions.create(prompt="The Kimi-K3 model is", **fixed)
        else:
            messages = [{"role": "user", "content": "Who are you?"}]
            parts = client.chat.completions.create(messages=messages, **fixed)
        for part in parts:
            choice = part.choices[0] if part.choices else None
            if choice is None:
                continue
            text = choice.text if kind == "completion" else choice.delta.content or ""
            first = first or time.perf_counter() - start
            tokens += 1
            console.print(f"[cyan]{escape(text)}[/]", end="", highlight=False)
        seconds = time.perf_counter() - start
        results.add_row(kind, str(tokens), f"{first:.2f} s", f"{seconds:.2f} s")
    console.print()


def stop(server: subprocess.Popen) -> None:
    """Stop the server as Ctrl-C would, and make sure that it is gone."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        code = server.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        raise SystemExit(
            f"the server did not stop within {STOP_SECONDS} s and was killed"
        ) from None
    console.print(f"server stopped, exit code {code}")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text-only", action="store_true", help="leave out the vision tower")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kimi-k3-demo-") as temporary:
        folder, log = Path(temporary) / "checkpoint", Path(temporary) / "server.log"
        with console.status("writing a checkpoint"):
            kind = "--text-only" if options.text_only else "--full"
            made = subprocess.run(
                [script("kimi-k3"), "make-checkpoint", str(folder), "--preset=tiny", kind],
                capture_output=True,
                text=True,
                check=False,
            )
        if made.returncode:
            raise SystemExit(f"kimi-k3 make-checkpoint failed:\n{made.stderr}")
        console.print(f"checkpoint: {made.stdout.strip()}", highlight=False)

        port = free_port()
        results = Table(title="requests", title_justify="left")
        for column in ("request", "pieces", "first after", "all after"):
            results.add_column(column, justify="left" if column == "request" else "right")
        with log.open("w") as output:
            server = subprocess.Popen(
                [script("vllm"), "serve", str(folder), f"--port={port}", *ARGUMENTS],
                env=os.environ | ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_ready(server, port, log)
            console.print(f"server ready after {time.monotonic() - began:.0f} s, on port {port}")
            converse(port, results)
        finally:
            stop(server)
        console.print(results)
    console.print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
