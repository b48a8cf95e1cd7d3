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


def acquire(path: Path, wait: float | None = None) -> int | None:
    """Make the file, folders too, and hold it. Its descriptor, or None if another process does.

    Args:
        path: Of the file; it is no part of a result.
        wait: Seconds to try; by default `WAIT`.

    Raises:
        OSError: It cannot be made.
    """
    deadline = time.monotonic() + (WAIT if wait is None else wait)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have finished and removed the file in between.
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(lock)
                raise
        os.close(lock)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
