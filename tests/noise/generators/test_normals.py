"""Rows of rounded normals: what they depend on, slices of them, and an entry by the definition."""

import hashlib

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dptrain.noise.generators import SECURE, Normals
from dptrain.noise.generators.normals import CHUNK

BITS = 43


def draw(size, *, seed=1, group=0, step=0, bits=BITS, scale=1.0):
    out = torch.full((size,), torch.nan, dtype=torch.float64)
    Normals(seed).fill(out, group=group, step=step, bits=bits, scale=scale)
    return out


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1001, CHUNK - 1, CHUNK, CHUNK + 1])
def test_every_entry_is_drawn(size):
    out = draw(size)
    assert torch.equal(out, out.round())
    assert len(torch.unique(out)) == size  # of 2^43 and more numbers


@pytest.mark.parametrize(
    "change", [{"step": 1}, {"group": 1}, {"seed": 0}, {"seed": 1 + (1 << 64)}]
)
def test_everything_that_names_a_row_changes_it(change):
    a, b = draw(10_000) * 2.0**-BITS, draw(10_000, **change) * 2.0**-BITS
    assert abs((a * b).mean()) < 6 / np.sqrt(10_000)


def test_chunks_differ():
    out = draw(2 * CHUNK) * 2.0**-BITS
    assert abs((out[:CHUNK] * out[CHUNK:]).mean()) < 6 / np.sqrt(CHUNK)


@pytest.mark.parametrize("size", [CHUNK // 3, 2 * CHUNK + 1001, 9 * CHUNK + 7])
def test_the_number_of_threads_changes_nothing(size):
    """Torch divides the work on a chunk among threads, a pool the chunks of long rows."""
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(draw(size))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(("size", "chunk"), [(7, 0), (10, 0), (CHUNK + 5, 1), (CHUNK, 0)])
@pytest.mark.parametrize(("bits", "scale"), [(43, 1.0), (30, 0.37)])
def test_against_a_slow_reference(size, chunk, bits, scale):
    # Block by block through AES itself, the transform by 40 digits.
    numbers = b"".join(number.to_bytes(16, "little") for number in (2, 3))
    key = hashlib.blake2b(
        numbers, key=(1 << 90).to_bytes(16, "little"), digest_size=32, person=b"dptrain.noise"
    ).digest()
    length = min(CHUNK, size - chunk * CHUNK)
    half = (length + 1) // 2
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def word(index):
        block = aes.update(((chunk << 32) + 2 + index // 2).to_bytes(16, "big"))
        return int.from_bytes(block[8 * (index % 2) :][:8], "little")

    drawn = draw(size, seed=1 << 90, group=2, step=3, bits=bits, scale=scale)
    drawn = drawn.tolist()[chunk * CHUNK :][:length]
    # The dither takes the leading bits of a word: 2^-5 of the deviation, or less than twice less.
    leading = next(k for k in range(64) if 2 ** (k + 1) > scale * 2**bits / 32)
    with mpmath.workdps(40):
        for i in range(min(half, 50)):
            w, x, y, z = (word(i + k * half) for k in range(4))
            low = ((y % 2**26) * 2**26 + z % 2**26) * 2**9 + (x >> 2) % 2**9
            u = mpmath.mpf((w >> 1) * 2**62 + 2 * low + 1) / 2**126
            u = 1 - u if w & 1 else u
            signed = [v - (v >> 63 << 64) for v in (x, y, z)]
            angle = mpmath.pi / 4 * (2 * (signed[0] >> 11) + 1) / 2**53
            pair = [mpmath.cos(angle) * (1 - 2 * (x & 1)), mpmath.sin(angle)]
            if x >> 1 & 1:
                pair.reverse()
            radius = mpmath.sqrt(-2 * mpmath.log(u)) * scale * 2**bits
            for at, wave, dither in ((i, pair[0], signed[1]), (i + half, pair[1], signed[2])):
                if at < length:
                    exact = radius * wave + (dither >> 64 - leading)
                    assert abs(drawn[at] - exact) <= 0.5 + scale * 2.0 ** (bits - 46)


@pytest.mark.parametrize("place", [{}, {"start": 100, "size": 3 * CHUNK}, {"bits": 30, "scale": 3}])
def test_secure_normals_are_the_same_on_the_cpu(place):
    """Their bits come from the cipher on every device."""
    rows = []
    for secure in (False, True):
        out = torch.empty(CHUNK + 9, dtype=torch.float64)
        Normals(5, secure=secure).fill(out, group=1, step=2, **{"bits": BITS, **place})
        rows.append(out)
    assert torch.equal(*rows)
    assert Normals(5).name != Normals(5, secure=True).name


def test_secure_normals_of_another_device_are_drawn_on_the_cpu_and_copied():
    """The path of a GPU: here "another device" is a tensor that says it is on one."""
    asked = []

    class Watched(Normals):
        def fill(self, out, **place):
            asked.append(out.device.type)
            super().fill(out, **place)

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    out = torch.empty(9, dtype=torch.float64).as_subclass(Elsewhere)
    Watched(5, secure=True).fill(out, group=1, step=2, bits=BITS)
    assert asked == ["cuda", "cpu"]
    expected = torch.empty(9, dtype=torch.float64)
    Normals(5).fill(expected, group=1, step=2, bits=BITS)
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def test_the_generators_are_named():
    assert Normals(5).on({"cpu"}).startswith("AES-256-CTR")
    assert "Philox" not in Normals(5).on({"cpu"})
    assert "AES" not in Normals(5).on({"cuda"})
    assert Normals(5).on({"cpu", "cuda"}) == Normals(5).name
    for devices in ({"cpu"}, {"cuda"}, {"cpu", "cuda"}):
        assert Normals(5, secure=True).on(devices) == SECURE
    assert SECURE.startswith("AES-256-CTR")
    assert "Philox" not in SECURE


def test_global_generators_are_left_alone():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), draw(50)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, draw(50))


def test_refuses_other_devices():
    out = torch.empty(3, device="meta", dtype=torch.float64)
    with pytest.raises(ValueError, match="device=meta"):
        Normals(0).fill(out, group=0, step=0, bits=BITS)
    with pytest.raises(ValueError, match="device=meta"):
        Normals(0, secure=True).fill(out, group=0, step=0, bits=BITS)


SIZE = 2 * CHUNK + 1001


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 0),
        (0, SIZE),
        (0, 5),
        (CHUNK // 2 - 3, CHUNK // 2 + 3),
        (CHUNK - 1, CHUNK + 1),
        (CHUNK, 2 * CHUNK),
        (17, 2 * CHUNK + 18),
        (2 * CHUNK + 500, SIZE),
        (SIZE, SIZE),
    ],
)
def test_a_slice_equals_the_same_entries_of_the_whole_row(start, stop):
    whole, part = draw(SIZE, seed=3, group=1, step=2), torch.full((stop - start,), torch.nan)
    part = part.double()
    Normals(3).fill(part, group=1, step=2, start=start, size=SIZE, bits=BITS)
    assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize(("start", "size"), [(-1, 9), (8, 9), (0, 1)])
def test_refuses_a_slice_that_leaves_the_row(start, size):
    out = torch.empty(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"start={start}.*size={size}"):
        Normals(0).fill(out, group=0, step=0, start=start, size=size, bits=BITS)
