# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""SHA-256 of a file while it is read or written, in a thread beside the work.

Bytes that come by in the file's order are taken from memory. The rest is read from the file, where
it is in the page cache still.
"""

import os
from collections.abc import Callable
from hashlib import sha256
from queue import Queue
from threading import Thread

READ_PIECE = 4 << 20
_Offer = tuple[int, memoryview, Callable[[], None]]


class RunningDigest:
    """The checksum of one open file.

    Args:
        file: Descriptor.
        size: Bytes of the whole file.
        whole: The file is complete from the start; else only what was offered may be read.
    """

    def __init__(self, file: int, size: int, *, whole: bool) -> None:
        self._file = file
        self._size = size
        self._digest = sha256()
        self._position = 0
        # What may be read of a file that is still being written: start -> end.
        self._there = {0: size} if whole else {}
        self._buffer = memoryview(bytearray(READ_PIECE))
        self._offers: Queue[_Offer | None] = Queue(maxsize=2)
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def offer(self, at: int, data: memoryview, release: Callable[[], None] = lambda: None) -> None:
        """Tell that bytes of the file are `data`; blocks while two offers wait.

        Args:
            at: Where they begin. No byte is offered twice.
            data: Must not change before `release` is called.
            release: Called from the thread, once.
        """
        self._offers.put((at, data, release))

    def finish(self) -> str:
        """The checksum of the whole file.

        Raises:
            OSError: The file could not be read, or is shorter than it was.
        """
        self._end()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def stop(self) -> None:
        """End the thread soon, whatever there is left to read."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._offers.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (offer := self._offers.get()) is not None:
            at, data, release = offer
            try:
                # After an error offers are only taken, so that nobody waits for ever.
                if self._error is None:
                    self._take(at, data)
            except BaseException as error:
                self._error = error
            finally:
                del data, offer
                release()
        try:
            if self._error is None:
                self._read(self._size)
        except BaseException as error:
            self._error = error

    def _take(self, at: int, data: memoryview) -> None:
        if self._position < at:
            self._read(at)
        if self._position == at:
            self._digest.update(data)
            self._position = at + len(data)
        elif self._position < at:
            self._there[at] = at + len(data)

    def _read(self, until: int) -> None:
        """Go on from the file, as far as it may be read."""
        while self._position < until and not self._stopped:
            end = min(self._may_read(), until)
            if end <= self._position:
                return
            while self._position < end and not self._stopped:
                view = self._buffer[: min(READ_PIECE, end - self._position)]
                count = os.preadv(self._file, [view], self._position)
                if count == 0:
                    raise OSError(f"a file ends at byte {self._position:,}, expected {end:,}")
                self._digest.update(view[:count])
                self._position += count

    def _may_read(self) -> int:
        """The end of what is there from the position on."""
        if 0 in self._there and self._there[0] == self._size:
            return self._size
        end = self._position
        while end in self._there:
            end = self._there.pop(end)
        return end
