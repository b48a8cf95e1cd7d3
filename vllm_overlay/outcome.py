# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What became of each amendment: plain records for the log line, the status table and the tests."""

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """Where an amendment stands in this process."""

    WAITING = "waiting"  # its module has not been imported yet
    AMENDED = "amended"
    STOOD_DOWN = "stood down"  # upstream needs no change, or an optional one does not fit
    LOST_TARGET = "lost its target"  # upstream no longer has the module that it amends
    REFUSED = "refused"  # the installed vLLM is not the one it was written for


@dataclass(frozen=True)
class Outcome:
    """One amendment's state in this process, and why.

    Attributes:
        module: Full name of the amended upstream module.
        state: What happened so far.
        reason: One sentence; empty while waiting.
    """

    module: str
    state: State
    reason: str = ""


def summarize(outcomes: list[Outcome]) -> str:
    """Return one line that names every amendment under its state, for the log.

    Modules are named without the package that they all lie in.
    """
    parts = []
    for state in State:
        names = [outcome.module.partition(".")[2] for outcome in outcomes if outcome.state is state]
        if names:
            label = "amended on import" if state is State.WAITING else state.value
            parts.append(f"{label}: {', '.join(names)}")
    return "; ".join(parts) or "no amendments"
