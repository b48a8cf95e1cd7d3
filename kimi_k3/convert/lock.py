# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Who may convert into a folder: a lock that the kernel frees when its holders are dead.

The workers inherit its descriptor, so that the folder stays locked until the last of them is gone
after their parent was killed. filelock (tried: 4.3) does not offer its descriptor: with it, another
process got the lock while a worker of a killed parent was still writing.
"""

import errno
import fcntl
import os
import time
from pathlib import Path

# A run that was killed holds the lock until its last worker is gone, which takes a moment.
WAIT = 3.0
_BUSY = (errno.EAGAIN, errno.EACCES)


def acquire(path: Path) -> int | None:
    """Make the file, folders too, and hold it. Its descriptor, or None if another process does.

    Raises:
        OSError: It cannot be made.
    """
    deadline = time.monotonic() + WAIT
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # The run before may have finished and removed the file in between.
            if _try(lock) and path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def is_held(path: Path) -> bool:
    """Whether somebody holds it at this moment; makes nothing."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try(lock)
    finally:
        os.close(lock)


def _try(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        return False
    return True
