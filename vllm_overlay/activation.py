# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Puts the overlay tree in place in this process, early or late, once or again.

vLLM calls the two plugin functions in every process that it starts. The platform plugin comes
before any model code is imported; the general plugin is the safety net for processes that skip
platform plugins, and the place where a refusal stops the engine (vLLM swallows what a platform
plugin raises).
"""

import ast
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from vllm_overlay.compat import SWITCH, StandDown
from vllm_overlay.outcome import Outcome, State, summarize
from vllm_overlay.tree import (
    SUBJECT,
    SUPPORTED,
    Tree,
    compare_installed,
    is_tested,
    upstream_version,
)
from vllm_overlay.undo import remember

# A child of vLLM's own logger, so that its handlers, format and level apply.
logger = logging.getLogger("vllm.overlay")

_DISTRIBUTION = "vllm-kimi-k3"
# Left in an amended module's namespace: the file that amended it.
_MARK = "__vllm_overlay__"
# Set in the head of an amendment whose lack makes nothing wrong: where it does not fit, it stands
# down with a warning.
_OPTIONAL = "OVERLAY_OPTIONAL"

_lock = threading.RLock()
_tree: Tree | None = None
_outcomes: dict[str, Outcome] = {}
_refusals: dict[str, Exception] = {}
# Modules that have a hook, and modules that are being amended.
_hooked: set[str] = set()
_amending: set[str] = set()
_plugins_loaded = False
_reported = False


def is_switched_off() -> bool:
    """Tell whether the environment switches the overlay off.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}: expected 0 (off) or 1 (on, the default), found {value!r}")
    return value == "0"


def is_active() -> bool:
    """Tell whether the overlay's amendments are in force in this process."""
    return bool(_outcomes)


def outcomes() -> list[Outcome]:
    """Return what became of each amendment so far, sorted by module name."""
    return [_outcomes[name] for name in sorted(_outcomes)]


def activate(*, amendments: bool = True) -> bool:
    """Lay the overlay over the installed vLLM in this process. Calling it again does no harm.

    Modules imported from now on are amended as they load, those already imported at once. The
    environment variable ``VLLM_KIMI_K3_OVERLAY=0`` switches it off. An amendment that does not fit
    leaves its module as it was; what is refused then is `SUBJECT`, whose import fails.

    Args:
        amendments: False makes only the new modules importable and leaves upstream's own as they
            are, whatever the environment says: for showing stock behaviour beside ours.

    Returns:
        Whether amendments are in force after the call.

    Raises:
        ModuleNotFoundError: No vLLM is installed.
        OverlayMismatchError: `SUBJECT` was imported before, and an amendment does not fit.
    """
    if amendments and is_switched_off():
        return False
    tree = _lay()
    if amendments:
        for name in tree.lost:
            reason = f"vLLM {upstream_version(tree.upstream)} has no such module"
            _outcomes.setdefault(name, Outcome(name, State.LOST_TARGET, reason))
        for name, file in tree.amendments.items():
            _arrange(name, file)
        for name, error in list(_refusals.items()):
            if _concerns_subject(name):
                raise error
    return is_active()


def platform_plugin() -> None:
    """Entry point of ``vllm.platform_plugins``: activates the overlay, selects no platform."""
    activate()


def general_plugin() -> None:
    """Entry point of ``vllm.general_plugins``: activates the overlay and says so in one line."""
    global _plugins_loaded
    if activate():
        _plugins_loaded = True
        _report()
    else:
        logger.info("%s is switched off by %s=0", _DISTRIBUTION, SWITCH)


def _report() -> None:
    """Say once what was amended, as soon as somebody listens."""
    global _reported
    # `vllm serve` loads plugins to build its argument parser, before it sets up logging.
    if _reported or not _plugins_loaded or not logger.isEnabledFor(logging.INFO):
        return
    _reported = True
    found = upstream_version(_lay().upstream)
    line = f"{_DISTRIBUTION} {_own_version()} over vLLM {found}: {summarize(outcomes())}"
    if not is_tested(found):
        line += f" (vLLM {found} is outside the tested {SUPPORTED}; every name was checked)"
    logger.info(line)


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


def _lay() -> Tree:
    """Compare the trees and make the new modules importable, once."""
    global _tree
    with _lock:
        if _tree is None:
            tree = compare_installed()
            for name in tree.lost:
                # Python's own mark of a module that cannot be imported. Its file may lie in a
                # folder that is appended to a package's path for the new modules there.
                sys.modules.setdefault(name, None)  # type: ignore[arg-type]
            _when_imported(_on_subject, SUBJECT)
            for package, folder in tree.extended.items():
                _when_imported(partial(_extend_path, folder), package)
            _tree = tree
        return _tree


def _when_imported(hook: Callable[[ModuleType], None], name: str) -> None:
    # Imported here, because `import vllm_overlay` alone must cost next to nothing.
    from wrapt import register_post_import_hook

    register_post_import_hook(hook, name)


def _extend_path(folder: Path, package: ModuleType) -> None:
    if str(folder) not in package.__path__:
        package.__path__.append(str(folder))


def _arrange(name: str, file: Path) -> None:
    """Amend a loaded module now, and any other when it loads."""
    # The lock guards the bookkeeping alone. Held across an amendment, it could meet an import lock
    # that another thread holds while it waits for this one.
    with _lock:
        if _outcomes.setdefault(name, Outcome(name, State.WAITING)).state is not State.WAITING:
            return
    module = sys.modules.get(name)
    # A module that is still running further up the stack would overwrite what is amended now. It
    # waits for its hook or the next call: vLLM makes one when it loads general plugins.
    if module is None:
        _hook(name, file)
    elif not _is_running(module):
        # With a hook or without: hooks miss an import that another thread began before they were
        # registered, or while somebody merely looked for the module.
        _apply(name, file, module)


def _is_running(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _hook(name: str, file: Path) -> None:
    """Let a module be amended as soon as it is imported."""
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    registering = True

    def amend(module: ModuleType) -> None:
        # wrapt calls a hook at once where another thread has just begun to import the module.
        if registering and _is_running(module):
            _hooked.discard(name)
        else:
            _on_import(name, file, module)

    _when_imported(amend, name)
    registering = False


def _on_import(name: str, file: Path, module: ModuleType) -> None:
    _apply(name, file, module)
    if name in _refusals and _concerns_subject(name):
        _fail_import(name, partial(_on_import, name, file), _refusals[name])
    _report()


def _on_subject(module: ModuleType) -> None:
    """Fail the import of the package that the tree is for, if any amendment was refused."""
    for error in _refusals.values():
        _fail_import(SUBJECT, _on_subject, error)


def _fail_import(name: str, hook: Callable[[ModuleType], None], error: Exception) -> NoReturn:
    # wrapt drops a hook before it calls it. Arm it again, or a second attempt at this import would
    # hand out the module unamended. The import system drops the failed module itself.
    sys.modules.pop(name, None)
    _when_imported(hook, name)
    raise error


def _concerns_subject(name: str) -> bool:
    """Tell whether a module that could not be amended must not be used in this process."""
    return f"{name}.".startswith(f"{SUBJECT}.") or SUBJECT in sys.modules


def _apply(name: str, file: Path, module: ModuleType) -> None:
    """Run an amendment in the module's namespace, once; on any failure leave no trace of it."""
    namespace = vars(module)
    with _lock:
        if name in _amending:
            return
        _amending.add(name)
    try:
        if _MARK not in namespace:
            _outcomes[name] = _run(name, file, namespace)
        else:
            _outcomes[name] = Outcome(name, State.AMENDED, _summary(Path(namespace[_MARK])))
    finally:
        _amending.discard(name)


def _run(name: str, file: Path, namespace: dict[str, Any]) -> Outcome:
    undo, docstring = remember(namespace), namespace.get("__doc__")
    try:
        # Its own file name, so that tracebacks, breakpoints and coverage point at the amendment.
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), namespace)
    except Exception as error:
        optional = namespace.get(_OPTIONAL, False)
        undo()
        if isinstance(error, StandDown):
            logger.log(error.level, "%s: stood down: %s", name, error)
        elif optional:
            logger.warning("%s: stood down: %s", name, error)
        else:
            _refusals[name] = error
            logger.warning("%s: refused, so %s cannot be used: %s", name, SUBJECT, error)
            return Outcome(name, State.REFUSED, str(error))
        return Outcome(name, State.STOOD_DOWN, str(error))
    namespace["__doc__"] = docstring
    namespace[_MARK] = str(file)
    _refusals.pop(name, None)
    logger.debug("%s: amended by %s", name, file)
    return Outcome(name, State.AMENDED, _summary(file))


def _summary(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_bytes())) or str(file)
    return docstring.splitlines()[0]
