# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Which modules of the installed vLLM are amended here, and on what machine."""

import importlib
import importlib.metadata
import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

import vllm_overlay
from vllm_overlay.tree import SUPPORTED, Tree, compare_installed, is_tested, upstream_version

_TRITON = ("triton", "pytorch-triton-rocm", "triton-rocm")
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
        tested: Whether vLLM's version is in the range that the overlay is tested with.
    """

    versions: dict[str, str]
    platform: str
    architecture: str
    amendments: list[Amendment]
    switched_off: bool
    tested: bool

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; `versions` says in words whether vLLM's is a tested one."""
        found = asdict(self)
        del found["tested"]
        return found

    @property
    def healthy(self) -> bool:
        """Whether no amendment was refused and no amended module failed to import."""
        return all(row.outcome not in UNHEALTHY for row in self.amendments)


def installed_version(*distributions: str, module: str | None = None) -> str:
    """Return the version of the first of some distributions that is installed, or say that none is.

    Args:
        distributions: Names that one package goes by.
        module: What may be imported without any of them.
    """
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
            "vllm-kimi-k3": installed_version("vllm-kimi-k3"),
            "vllm": found if is_tested(found) else f"{found} (outside the tested {SUPPORTED})",
            "torch": installed_version("torch"),
            "triton": installed_version(
                "triton", "pytorch-triton-rocm", "triton-rocm", module="triton"
            ),
            "aiter": installed_version("amd-aiter", "aiter", module="aiter"),
        },
        platform=type(current_platform).__name__,
        architecture=_architecture(),
        amendments=amendments,
        switched_off=switched_off,
        tested=is_tested(found),
    )
