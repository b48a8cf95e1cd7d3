# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Lets a module or class have another attribute within a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that the target itself has, and set it back at the end of the context.

    Raises:
        AttributeError: The target has no attribute of that name.
    """
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
