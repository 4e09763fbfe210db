"""Past noise in a file instead of memory: no name, nobody else's to read, read ahead of a step."""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Sequence

import torch

AHEAD = 1 << 30  # bytes that are read ahead: of the next step while the model computes, and within
_REQUEST = 1 << 17  # bytes; Linux reads no more of one request than the disk's own readahead
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class History:
    """The buffers of a stream, as tensors over a file that is mapped into memory.

    The system writes to the disk what it has no room for, and takes out of memory what was read
    longest ago; a step reads the buffers in order and drops each from this process when it is done
    with it. Because a cache that forgets what was read longest ago never holds what comes next when
    the whole does not fit, the next ``AHEAD`` bytes are asked for in time: those that a step begins
    with by a thread, while the model computes (``read_ahead``).

    Past noise is secret: whoever has it can undo the releases. So the file is created with mode
    0600 under a name of 128 random bits that nothing has yet (``O_EXCL``), and loses the name
    before anything is written to it: a process that is killed leaves no file. Between the two, in
    a folder that others reach, someone could give the file a second name, which would stay:
    a sticky bit does not forbid links, so such folders are refused, ``/tmp`` among them.

    Args:
        folder: on a disk of this machine; owned by this user and closed to others (mode 0700).
        blocks: shapes of the buffers of each block, in the order in which a step reads them.
        dtype: of all buffers.

    Attributes:
        buffers: zeros, as many and of the shapes that ``blocks`` says.
    """

    def __init__(
        self,
        folder: str,
        blocks: Sequence[Sequence[tuple[int, ...]]],
        dtype: torch.dtype,
    ) -> None:
        # Buffers start where pages do, as drops are by pages, and products may round by alignment.
        lengths = [[math.prod(shape) * dtype.itemsize for shape in shapes] for shapes in blocks]
        spans = [[-(-each // mmap.PAGESIZE) * mmap.PAGESIZE for each in block] for block in lengths]
        edges = list(itertools.accumulate((sum(block) for block in spans), initial=0))
        self._spans = list(itertools.pairwise(edges))
        self._size = edges[-1]
        self._file = _nameless(folder, self._size)
        # At exit the system closes it.
        weakref.finalize(self, os.close, self._file).atexit = False
        self._map = mmap.mmap(self._file, self._size)
        self._process = os.getpid()
        self._reader: threading.Thread | None = None
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._first = whole.data_ptr()
        self.buffers: list[list[torch.Tensor]] = []
        for (start, _), shapes, sizes, padded in zip(
            self._spans, blocks, lengths, spans, strict=True
        ):
            starts = itertools.accumulate(padded, initial=start)
            self.buffers.append(
                [
                    whole[first : first + size].view(dtype).view(shape)
                    for first, size, shape in zip(starts, sizes, shapes, strict=False)
                ]
            )

    def check_process(self) -> None:
        """Refuse to go on in a fork, which shares the file: its steps would be the parent's too."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the past noise of this stream is in a file of process {self._process}, which a "
                "forked process must not change: draw noise in that process, or open another stream"
            )

    def begin(self, block: int) -> None:
        """A step is about to read a block: map it at once, ask for what lies ``AHEAD`` of it."""
        start, stop = self._spans[block]
        self._ask_for(start + AHEAD, stop + AHEAD)
        try:
            self._map.madvise(_POPULATE_READ, start, stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older Linux maps pages as they are read
                raise

    def write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """``out``, a row of a buffer, ← ``values`` of its dtype.

        The file is written to, which the buffers show at once: to store a page that is mapped takes
        an interrupt each, and where the disk fails that would end the process without a word.
        """
        at = out.data_ptr() - self._first
        left = values.contiguous().view(torch.uint8).numpy().data
        while left:
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done

    def end(self, block: int) -> None:
        """A step is done with a block: it leaves this process, what was written is kept."""
        start, stop = self._spans[block]
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def read_ahead(self) -> None:
        """Start a thread that asks for the blocks that the next step begins with."""
        if self._reader is None or not self._reader.is_alive():
            # No daemon: one that is stopped within a call as Python ends takes the process with it.
            self._reader = threading.Thread(
                target=self._ask_for, args=(0, AHEAD), name="dptrain-history"
            )
            self._reader.start()

    def drop(self) -> None:
        """All blocks leave this process."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _ask_for(self, start: int, stop: int) -> None:
        """A hint to the system: no tensor and no byte of the file is touched here."""
        for first in range(start, min(stop, self._size), _REQUEST):
            os.posix_fadvise(self._file, first, _REQUEST, os.POSIX_FADV_WILLNEED)


def check_private_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that past noise must not lie in; see ``History``.

    Raises:
        NotADirectoryError, FileNotFoundError, PermissionError, OSError: saying why.
    """
    os.close(_open_folder(folder))


def _nameless(folder: str, size: int) -> int:
    """The descriptor of a new file of zeros, whose room on the disk is taken."""
    directory = _open_folder(folder)
    try:
        name = f".dptrain-noise-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            os.unlink(name, dir_fd=directory)
            _take_room(file, size, folder)
        except BaseException:
            os.close(file)
            raise
    finally:
        os.close(directory)
    return file


def _open_folder(folder: str | os.PathLike[str]) -> int:
    """The descriptor of a folder that was looked at; what its path means later does not matter."""
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "posix_fadvise"):
        raise OSError(
            errno.ENOSYS,
            f"folder={folder!r}: this system has no posix_fallocate, which reserves the space "
            "for past noise: leave folder out",
        )
    remedy = "use a folder of your own that nobody else can access (mkdir -m 700)"
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:  # of the kind that its number has
        text = f"folder={folder!r} cannot be opened ({error.strerror}): {remedy}"
        raise OSError(error.errno, text) from error
    found = os.fstat(directory)
    reason = ""
    if found.st_uid != os.geteuid():
        reason = f"belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this"
    elif mode := stat.S_IMODE(found.st_mode) & 0o077:
        reason = (
            f"has mode {stat.S_IMODE(found.st_mode):04o}, which gives others access ({mode:03o})"
        )
    if reason:
        os.close(directory)
        raise PermissionError(
            errno.EACCES,
            f"folder={folder!r} {reason}: past noise must stay secret, since it allows anyone "
            f"to remove the noise from the releases; {remedy}",
        )
    return directory


def _take_room(file: int, size: int, folder: str) -> None:
    """Set ``size`` bytes aside on the disk, so that no later step finds it full."""
    found = os.fstatvfs(file)
    free = found.f_bavail * found.f_frsize
    cause: OSError | None = None
    if size <= free:
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            cause = error
        else:
            return
    raise OSError(
        errno.ENOSPC,
        f"folder={folder!r}: past noise takes {size:,} bytes, {free:,} bytes are free there"
        + (f" ({cause.strerror})" if cause is not None else ""),
    ) from cause
