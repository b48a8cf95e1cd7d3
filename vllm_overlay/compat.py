# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The compatibility check that opens every amendment.

An amendment asks here for each upstream name that it relies on, before it changes the first one. It
either gets the object or ends with an error that says what the installed vLLM lacks. The error
refuses the package that the tree is for; but an amendment that diagnoses or speeds up sets
``OVERLAY_OPTIONAL = True`` before its first check, and then stands down with a warning instead.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any, NoReturn

from vllm_overlay.tree import SUPPORTED, upstream_root, upstream_version

# Environment variable: 0 runs vLLM as it is.
SWITCH = "VLLM_KIMI_K3_OVERLAY"


class OverlayMismatchError(ImportError):
    """The installed vLLM lacks a name or signature that an amendment relies on.

    An ImportError, because it fails the import of the module that could not be amended.
    """

    def __init__(self, module: str, name: str, expected: str, found: str) -> None:
        root = upstream_root()
        version = upstream_version(root) if root else "not installed"
        super().__init__(
            f"cannot amend the installed vLLM {version}: {module}: {name}: expected {expected}, "
            f"found {found}. Supported are vLLM {SUPPORTED}. Install one of these, or set "
            f"{SWITCH}=0 to run this vLLM as it is, without the overlay.",
            name=module,
        )
        self.module = module
        self.expected = expected
        self.found = found


class StandDown(Exception):
    """Raised by `stand_down` and caught by activation: upstream needs no amendment here.

    Attributes:
        level: Level at which the log says so.
    """

    def __init__(self, reason: str, level: int) -> None:
        super().__init__(reason)
        self.level = level


def stand_down(reason: str, *, expected: bool = False) -> NoReturn:
    """End the running amendment without a change, because nothing is to be amended here.

    Args:
        reason: One sentence for the log and the status table.
        expected: True where this is the rule and no news, as on a platform that the amendment is
            not meant for; the log then says so at debug level only.
    """
    raise StandDown(reason, logging.DEBUG if expected else logging.INFO)


def _check_parameters(
    module: str, name: str, obj: Callable[..., object], expected: Sequence[str], exact: bool
) -> None:
    listed = f"({', '.join(expected)})"
    try:
        actual = inspect.signature(obj).parameters
    except (TypeError, ValueError) as error:
        raise OverlayMismatchError(
            module, name, f"a callable with parameters {listed}", repr(obj)
        ) from error
    found = f"({', '.join(str(p) for p in actual.values())})"
    if exact:
        if tuple(actual) != tuple(expected):
            raise OverlayMismatchError(module, name, f"exactly the parameters {listed}", found)
        return
    kinds = {p.kind for p in actual.values()}
    missing = [p for p in expected if p not in actual and Parameter.VAR_KEYWORD not in kinds]
    mandatory = [
        p.name
        for p in actual.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in expected
    ]
    if missing or mandatory:
        raise OverlayMismatchError(
            module,
            name,
            f"the parameters {listed} and no other mandatory one",
            f"{found}: missing {missing or 'none'}, also mandatory {mandatory or 'none'}",
        )


def require(
    target: str,
    *,
    parameters: Sequence[str] | None = None,
    exact: bool = False,
    uses: Sequence[str] = (),
) -> Any:
    """Return an upstream object, or refuse the amendment when it is not as expected.

    Args:
        target: ``"package.module:Qualified.name"``.
        parameters: Names that the callable must accept; any further parameter must be optional.
        exact: Allow no further parameter, and no other order: for a function that is replaced, or
            a wrapper that cannot pass on what it does not know.
        uses: Global or attribute names that the function's own code must refer to, for an amendment
            that works by rebinding such a name.

    Returns:
        The object itself.

    Raises:
        OverlayMismatchError: The module, the name, the signature or the use is missing.
    """
    module_name, _, qualified = target.partition(":")
    if not qualified:
        raise ValueError(f"require({target!r}): expected 'package.module:Qualified.name'")
    try:
        obj: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise OverlayMismatchError(
            module_name, qualified, "an importable module", str(error)
        ) from error
    for part in qualified.split("."):
        try:
            obj = getattr(obj, part)
        except AttributeError as error:
            raise OverlayMismatchError(
                module_name, qualified, "the name to exist", f"no {part!r}"
            ) from error
    if parameters is not None:
        _check_parameters(module_name, qualified, obj, parameters, exact)
    if uses:
        code = getattr(inspect.unwrap(obj), "__code__", None)
        found = code.co_names if code else ()
        absent = [name for name in uses if name not in found]
        if absent:
            raise OverlayMismatchError(
                module_name, qualified, f"its code to refer to {', '.join(absent)}", "no such use"
            )
    return obj
