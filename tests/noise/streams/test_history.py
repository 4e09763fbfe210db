"""Past noise in a file: the bits of memory, nobody else's to read, and gone with the process."""

import dataclasses
import errno
import gc
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from dptrain.noise import factory, noise_stream
from dptrain.noise.streams import ConvolutionStream, history
from dptrain.noise.streams.layout import Layout
from dptrain.strategies import BISR, BLT, BSR, BandMF, Identity, TreeRestart
from tests.helpers.nameless import nameless_files

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="the system takes no room beforehand"
)

STRATEGIES = {
    "ring": BandMF(bands=4),
    "convolution": BISR(inverse_bands=4),
    "blt": BLT(buffers=2, max_participations=2, min_sep=3),
    "tree": TreeRestart(height=4),
}
STEPS = 13  # more than three times the bands
LIKE = [torch.empty(3, 70_000), torch.empty(0), torch.empty(()), torch.empty(90_001)]  # 2 blocks


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "private"
    found.mkdir(mode=0o700)
    return found


def open_stream(strategy, *, seed=7, like=LIKE, steps=STEPS, **options):
    return noise_stream(strategy, steps=steps, like=like, seed=seed, **options)


def rows(stream, count):
    return [[tensor.clone() for tensor in next(stream)] for _ in range(count)]


def assert_same(mine, others):
    assert len(mine) == len(others) > 0
    for one, other in zip(mine, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CUTS = {
    "whole": {},
    "shard": {"shard": (1, 3)},
    # The second runs over the end of a chunk of normals, and there are gaps.
    "pieces": {"pieces": [(5, 69_000), (0, 0), (0, 1), (17, 90_000)]},
    "groups": {"per_parameter": True},
}


@pytest.mark.sample(every=21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_gives_the_bits_of_memory_at_every_step(name, cut, dtype, folder):
    options = {"dtype": dtype, **CUTS[cut]}
    memory = open_stream(STRATEGIES[name], **options)
    file = open_stream(STRATEGIES[name], **options, folder=folder)
    assert file.buffer_bytes == memory.buffer_bytes > 0
    assert_same(rows(file, STEPS), rows(memory, STEPS))
    with pytest.raises(RuntimeError, match="rows of noise are used up"):
        next(file)
    held, other = file.state_dict(), memory.state_dict()
    for mine, theirs in zip(held.pop("buffers"), other.pop("buffers"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert held == other


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_short_writes_and_an_older_linux_change_no_bit(name, folder, monkeypatch):
    """A disk may take less than it is given, and Linux before 5.14 maps no block at once."""
    write, taken = os.pwrite, []

    def short(file, data, offset):
        taken.append(len(data))
        return write(file, data[: max(1, len(data) // 2)] if len(data) > 4096 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(history, "_POPULATE_READ", 9999)
    file = rows(open_stream(STRATEGIES[name], folder=folder), STEPS)
    assert max(taken) > 4096
    assert_same(file, rows(open_stream(STRATEGIES[name]), STEPS))


def test_a_disk_that_fails_says_so(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "the disk is gone")

    stream = open_stream(BSR(bands=4), folder=folder)
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_threads_that_share_the_blocks_give_the_same_bits(folder):
    like = [torch.empty(1_400_000)]  # six blocks, enough that threads are worth it
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        file = rows(open_stream(BSR(bands=3), like=like, steps=9, folder=folder), 9)
    finally:
        torch.set_num_threads(threads)
    assert_same(file, rows(open_stream(BSR(bands=3), like=like, steps=9), 9))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_runs_resume_from_memory_in_a_file_and_the_other_way(name, folder):
    expected = rows(open_stream(STRATEGIES[name]), STEPS)
    for first, second in (({}, {"folder": folder}), ({"folder": folder}, {})):
        stream = open_stream(STRATEGIES[name], **first)
        rows(stream, 6)
        state = stream.state_dict()
        next(stream)  # the state is of the step at which it was taken
        resumed = open_stream(STRATEGIES[name], seed=8, **second)
        next(resumed)
        resumed.load_state_dict(state)
        assert_same(rows(resumed, STEPS - 6), expected[6:])


def test_shards_in_files_resume_as_others_in_memory_and_back(folder):
    expected = rows(open_stream(BandMF(bands=4)), STEPS)
    shards = [open_stream(BandMF(bands=4), shard=(r, 3), folder=folder) for r in range(3)]
    assert len(nameless_files(folder)) == 3
    for shard in shards:
        rows(shard, 5)
    whole = open_stream(BandMF(bands=4), seed=8)
    whole.load_state_dict(*(shard.state_dict() for shard in shards))
    halves = [open_stream(BandMF(bands=4), seed=9, folder=folder).shard(r, 2) for r in range(2)]
    for half in halves:
        half.load_state_dict(whole.state_dict())
    together = [rows(half, STEPS - 5) for half in halves]
    for step, row in enumerate(expected[5:]):
        for index, tensor in enumerate(row):
            joined = torch.cat([each[step][index].flatten() for each in together])
            assert torch.equal(joined, tensor.flatten())
    assert_same(rows(whole, STEPS - 5), expected[5:])


@pytest.mark.parametrize("ahead", [1 << 17, 1 << 21, 1 << 30])
def test_every_byte_is_asked_for_before_it_is_read(ahead, folder, monkeypatch):
    """What a step begins with by a thread after the step before, the rest within the step."""
    monkeypatch.setattr(history, "AHEAD", ahead)
    asked, read = [], []
    hint = os.posix_fadvise

    def recorded(file, start, length, advice):
        asked.append((start, start + length))
        hint(file, start, length, advice)

    stream = open_stream(BSR(bands=4), folder=folder)
    next(stream)
    stream._history._reader.join()
    monkeypatch.setattr(os, "posix_fadvise", recorded)
    stream._history.read_ahead()
    stream._history._reader.join()
    size = stream._history._size
    assert asked[0][0] == 0
    assert asked[-1][1] >= min(ahead, size)
    correlate = stream._correlate

    def watched(block, row, buffers):
        start, stop = stream._history._spans[stream._blocks.index(block)]
        read.append((start, stop))
        ready = [part for part in asked if part[0] < min(start + ahead, size)]
        assert covers(ready, 0, min(start + ahead, size))
        correlate(block, row, buffers)

    monkeypatch.setattr(stream, "_correlate", watched)
    next(stream)
    stream._history._reader.join()
    assert covers(read, 0, size)
    assert sum(stop - start for start, stop in read) == size


def covers(parts, first, last):
    for start, stop in sorted(parts):
        if start > first:
            return False
        first = max(first, stop)
    return first >= last


def test_the_file_is_nobody_elses_and_has_no_name_when_it_is_written(folder, monkeypatch):
    calls = []

    def watch(name):
        real = getattr(os, name)

        def called(*args, **kwargs):
            calls.append((name, args, kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, called)

    for name in ("open", "unlink", "posix_fallocate"):
        watch(name)
    mask = os.umask(0)
    try:
        stream = open_stream(BSR(bands=4), folder=folder)
    finally:
        os.umask(mask)
    (_, directory, _), (_, made, where), (_, gone, there), (_, room, _) = calls
    assert [name for name, _, _ in calls] == ["open", "open", "unlink", "posix_fallocate"]
    assert directory[0] == str(folder)
    assert made[0] == gone[0]
    assert where == there  # relative to the folder that was looked at
    assert len(made[0]) >= 32  # 128 bits that nobody can guess
    assert made[1] & os.O_CREAT
    assert made[1] & os.O_EXCL
    assert made[1] & os.O_NOFOLLOW
    ((target, file),) = nameless_files(folder).items()
    assert target.endswith("(deleted)")
    found = os.fstat(file)
    assert found.st_mode & 0o7777 == 0o600
    assert found.st_nlink == 0
    assert found.st_size == room[2] >= stream.buffer_bytes
    assert found.st_blocks * 512 >= found.st_size  # the room is taken
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_the_file_goes_with_the_stream(folder):
    stream = open_stream(BSR(bands=4), folder=folder)
    state = rows(stream, 2) and stream.state_dict()
    stream._history._reader.join()
    maps, name = pathlib.Path("/proc/self/maps"), f"{folder}/.dptrain-noise-"
    assert name in maps.read_text(encoding="utf-8")
    del stream
    gc.collect()
    assert not nameless_files(folder)
    assert name not in maps.read_text(encoding="utf-8")
    resumed = open_stream(BSR(bands=4))  # what was saved does not need it
    resumed.load_state_dict(state)
    assert_same(rows(resumed, 3), rows(open_stream(BSR(bands=4)), 5)[2:])


START = """
import os, signal, sys
import torch
from dptrain.noise import noise_stream
from dptrain.strategies import BSR

def opened(**options):
    return noise_stream(BSR(bands=4), steps=13, like=[torch.empty(1000)], seed=1, **options)

stream = opened(folder=sys.argv[1])
next(stream)
"""


def script(text, folder):
    return subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(text), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_process_that_ends_while_pages_are_read_ahead_ends_well(folder):
    """A thread that Python stops within a call would abort the process."""
    done = script(
        """
        import time
        hint = os.posix_fadvise
        def slow(*args):
            time.sleep(0.5)
            hint(*args)
        os.posix_fadvise = slow
        stream._history._reader.join()
        next(stream)
        """,
        folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_file(folder):
    done = script("os.kill(os.getpid(), signal.SIGKILL)", folder)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_fork_does_not_change_the_history_of_its_parent(folder):
    done = script(
        """
        child = os.fork()
        if not child:
            for change in (lambda: next(stream), lambda: stream.load_state_dict(state)):
                state = stream.state_dict()
                try:
                    change()
                except RuntimeError as error:
                    assert "a fork" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        memory = opened()
        next(memory)
        for _ in range(5):
            assert torch.equal(next(stream)[0], next(memory)[0])
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o702, 0o704, 0o777, 0o1777])
def test_a_folder_that_others_may_enter_is_refused_by_its_mode(mode, folder):
    folder.chmod(mode)
    before = len(os.listdir("/proc/self/fd"))
    for strategy in (BSR(bands=4), Identity()):  # be there anything to keep or not
        with pytest.raises(PermissionError, match=rf"private' has mode {mode:04o}.*secret.*700"):
            open_stream(strategy, folder=folder)
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_of_somebody_else_is_refused(folder, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=rf"belongs to user {mine}, not to {mine + 1}"):
        open_stream(BSR(bands=4), folder=folder)


def test_what_is_no_folder_is_refused(folder):
    with pytest.raises(FileNotFoundError):
        open_stream(BSR(bands=4), folder=folder / "missing")
    (folder / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_stream(BSR(bands=4), folder=folder / "file")
    with pytest.raises(TypeError, match="folder=7"):
        open_stream(BSR(bands=4), folder=7)


def test_too_little_room_is_said_before_anything_is_drawn(folder, monkeypatch):
    """By what the disk says is free, and by what it then refuses."""
    needed = 4 * 3 * 5120  # three rows of pages
    options = {"like": [torch.empty(5120)], "folder": folder}
    before = len(os.listdir("/proc/self/fd"))
    found = os.statvfs(folder)
    with monkeypatch.context() as patched:
        few = {"f_bavail": 3, "f_frsize": 4096}
        patched.setattr(os, "fstatvfs", lambda _: type("Found", (), few))
        with pytest.raises(OSError, match=rf"takes {needed:,} bytes, 12,288 bytes are") as refused:
            open_stream(BSR(bands=4), **options)
        assert refused.value.errno == errno.ENOSPC
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (needed - 1, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"takes {needed:,} bytes.*File too large"):
            open_stream(BSR(bands=4), **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(folder.iterdir()) == []
    assert found.f_bavail > 0
    next(open_stream(BSR(bands=4), **options))


def test_a_stream_that_keeps_nothing_makes_no_file(folder):
    stream = open_stream(Identity(), folder=folder)
    assert stream.buffer_bytes == 0
    assert not nameless_files(folder)
    assert_same(rows(stream, 3), rows(open_stream(Identity()), 3))
    empty = open_stream(BSR(bands=4), like=[torch.empty(1)], shard=(0, 2), folder=folder)
    assert empty.buffer_bytes == 0
    assert not nameless_files(folder)


def test_what_cannot_be_in_a_file_is_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"with regenerate=True.*leave one of the two out"):
        open_stream(BISR(inverse_bands=4), regenerate=True, folder=folder)

    on_card = dataclasses.replace(Layout.of(LIKE), devices=(torch.device("cuda", 0),))
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "of", lambda *_, **__: on_card)
        with pytest.raises(ValueError, match="device cuda:0: past noise can be kept in a file"):
            open_stream(BSR(bands=4), folder=folder)

    class OnesStream(ConvolutionStream):
        def _allocate(self, row):
            return [buffer + 1 for buffer in super()._allocate(row)]

    monkeypatch.setattr(factory, "stream_class", lambda _: OnesStream)
    with pytest.raises(ValueError, match="OnesStream, whose buffers do not start at zero"):
        open_stream(BSR(bands=4), folder=folder)


PEAK = """
import pathlib, sys
import torch
from dptrain.noise import noise_stream
from dptrain.strategies import BSR, Identity

def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

like = [torch.empty(1).expand(1 << 22)]
next(noise_stream(Identity(), steps=1, like=like, seed=0))
before = resident("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")
options = {"folder": sys.argv[1]} if len(sys.argv) > 1 else {}
stream = noise_stream(BSR(bands=17), steps=40, like=like, seed=0, **options)
assert stream.buffer_bytes == 1 << 28
for _ in range(34):
    next(stream)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_the_memory_of_a_process_does_not_hold_the_history(folder):
    """256 MiB of it: in memory all of them, in a file a block and a row of 16 MiB."""
    peaks = []
    for arguments in ([], [str(folder)]):
        command = [sys.executable, "-c", PEAK, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        peaks.append(int(done.stdout))
    assert peaks[0] >= 1 << 28
    # A row, blocks of 16 MiB and what drawing takes: well below half.
    assert peaks[1] <= 1 << 26
