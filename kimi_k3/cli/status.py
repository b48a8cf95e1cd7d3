# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""`kimi-k3 status`: which modules of the installed vLLM are amended here, and on what machine."""

import importlib
import importlib.metadata
import importlib.util
import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import vllm_overlay
from kimi_k3.cli.output import quiet_vllm
from vllm_overlay.tree import SUPPORTED, Tree, compare_installed, is_tested, upstream_version

# Outcomes that keep vLLM from working as it should.
UNHEALTHY = frozenset({"refused", "not importable", "waiting"})


@dataclass(frozen=True)
class Amendment:
    """One row of the table: an amended module, its outcome in this environment, and why."""

    module: str
    outcome: str
    why: str


@dataclass(frozen=True)
class Status:
    """What `kimi-k3 status` found.

    Attributes:
        versions: Component -> version, or "not installed".
        platform: vLLM's platform class here.
        architecture: GPU architecture (``gfx942``, ``sm_90``) or "no GPU".
        amendments: One row per amended module.
        switched_off: Whether the environment switches the overlay off.
    """

    versions: dict[str, str]
    platform: str
    architecture: str
    amendments: list[Amendment]
    switched_off: bool

    @property
    def healthy(self) -> bool:
        """Whether no amendment was refused and no amended module failed to import."""
        return all(row.outcome not in UNHEALTHY for row in self.amendments)


def _version(*distributions: str, module: str | None = None) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if module and importlib.util.find_spec(module):
        return "installed, version unknown"
    return "not installed"


def _architecture() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _amendments(tree: Tree, switched_off: bool) -> list[Amendment]:
    """Import every amended module and report what became of it."""
    if switched_off:
        names = sorted(tree.amendments)
        return [Amendment(name, "off", f"{vllm_overlay.SWITCH}=0") for name in names]
    failures: dict[str, Exception] = {}
    try:
        vllm_overlay.activate()
    except vllm_overlay.OverlayMismatchError as error:
        failures[error.module] = error
    for outcome in vllm_overlay.outcomes():
        try:
            importlib.import_module(outcome.module)
        except Exception as error:
            failures[outcome.module] = error
    rows = []
    for outcome in vllm_overlay.outcomes():
        failure = failures.get(outcome.module)
        if outcome.state is vllm_overlay.State.WAITING and failure is not None:
            rows.append(Amendment(outcome.module, "not importable", str(failure)))
        else:
            rows.append(Amendment(outcome.module, outcome.state.value, outcome.reason))
    return rows


def collect() -> Status:
    """Look at this environment. Imports vLLM and every module that the overlay amends.

    Raises:
        ModuleNotFoundError: No vLLM is installed.
    """
    tree = compare_installed()
    switched_off = vllm_overlay.is_switched_off()
    amendments = _amendments(tree, switched_off)
    from vllm.platforms import current_platform

    found = upstream_version(tree.upstream)
    return Status(
        versions={
            "vllm-kimi-k3": _version("vllm-kimi-k3"),
            "vllm": found if is_tested(found) else f"{found} (outside the tested {SUPPORTED})",
            "torch": _version("torch"),
            "triton": _version("triton", "pytorch-triton-rocm", "triton-rocm", module="triton"),
            "aiter": _version("amd-aiter", "aiter", module="aiter"),
        },
        platform=type(current_platform).__name__,
        architecture=_architecture(),
        amendments=amendments,
        switched_off=switched_off,
    )


def _print(status: Status, console: Console) -> None:
    """Print the amendments under their outcomes, those that went wrong last, and what was found."""
    console.print(Text("Amended modules, by outcome", "bold"))
    outcomes = dict.fromkeys(row.outcome for row in status.amendments)
    for outcome in sorted(outcomes, key=lambda outcome: outcome in UNHEALTHY):
        rows = [row for row in status.amendments if row.outcome == outcome]
        style = "bold red" if outcome in UNHEALTHY else "bold green"
        console.print()
        console.print(Text(f"{outcome}: {len(rows)}", style))
        # A reason that all share (the overlay is off) is given once.
        shared = rows[0].why if len({row.why for row in rows}) == 1 else None
        for row in rows:
            console.print(Padding(Text(row.module), (0, 0, 0, 2)))
            if shared is None:
                console.print(Padding(Text(row.why, "dim"), (0, 0, 0, 6)))
        if shared is not None:
            console.print(Padding(Text(shared, "dim"), (0, 0, 0, 6)))
    found = Table(box=box.SIMPLE, title="Found", title_justify="left", show_header=False)
    for name, value in status.versions.items():
        found.add_row(name, Text(value))
    found.add_row("platform", status.platform)
    found.add_row("GPU architecture", status.architecture)
    console.print(found)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    """Show which modules of the installed vLLM are amended here, and why not if they are not.

    Exit code 1: an amendment was refused, or a module cannot be imported. 2: wrong usage.
    """
    quiet_vllm()
    try:
        status = collect()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(asdict(status), indent=2))
    else:
        _print(status, Console())
    if not status.healthy:
        raise typer.Exit(1)
