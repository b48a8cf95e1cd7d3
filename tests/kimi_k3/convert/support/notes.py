# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Progress that keeps what it is told in words."""

from kimi_k3.convert.progress import Progress


class Notes(Progress):
    """Progress with its notes in a list."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
