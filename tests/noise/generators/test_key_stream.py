"""Secure normals: the key stream against other code, the transform, and what an entry hangs on."""

import hashlib
import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dptrain.noise.generators import secure
from dptrain.noise.generators.secure import BLOCK, SecureNormals, row_key

SEED = 0x0123_4567_89AB_CDEF_FEDC_BA98_7654_3210


def draw(count, *, seed=SEED, group=0, step=0, **options):
    out = torch.full((count,), torch.nan)
    SecureNormals(seed).fill(out, group=group, step=step, **options)
    return out


def aes_words(key, counter, count):
    """``count`` 64-bit words from a counter on: AES on every counter block by itself, no CTR."""
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    text = b"".join(aes.update((counter + i).to_bytes(16, "big")) for i in range(count // 2))
    return [int.from_bytes(text[8 * i : 8 * i + 8], "little") for i in range(count)]


def reference(index, *, seed=SEED, group=0, step=0):
    """One entry of a row, entry by entry from the documentation of the class."""
    key = hashlib.blake2b(
        group.to_bytes(16, "little") + step.to_bytes(16, "little"),
        key=seed.to_bytes(16, "little"), digest_size=32, person=b"dptrain.secure",
    ).digest()  # fmt: skip
    block, place = divmod(index, 8192)
    column, wave = (place, math.cos) if place < 4096 else (place - 4096, math.sin)
    total = 0.0
    for draw_number in range(4):
        # Word (row r, column c) of a block is word 4096 r + c of its 32768, two a counter.
        at = [4096 * row + column for row in (draw_number, 4 + draw_number)]
        u, v = (aes_words(key, (block << 32) + 2 + w // 2, 2)[w % 2] >> 11 for w in at)
        total += math.sqrt(-2 * math.log((u + 1) / 2**53)) * wave(2 * math.pi * v / 2**53)
    return total / 2


@pytest.mark.parametrize("row", [{}, {"group": 3, "step": 2**33}, {"seed": 2**128 - 1}])
def test_entries_are_those_of_the_reference(row):
    drawn = draw(3 * BLOCK, **row)
    indices = [0, 1, 4095, 4096, 8191, 8192, 8193, 12288, 24575]
    expected = [reference(i, **row) for i in indices]
    # float32 keeps 6e-8 of a number; the sines of two libraries differ by less.
    np.testing.assert_allclose(drawn[indices].double(), expected, rtol=7e-8, atol=1e-12)


def test_key_stream_is_aes_of_the_counters():
    key = bytes(range(32))
    for block in (0, 1, 2**40):
        words = secure._words(key, block).ravel()
        first = (block << 32) + 2
        assert words[:64].tolist() == aes_words(key, first, 64)
        assert words[-64:].tolist() == aes_words(key, first + 16384 - 32, 64)


def test_known_answer_of_the_standard():
    """NIST SP 800-38A, F.1.5 (AES-256): the block cipher is the one that the name says."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("6bc1bee22e409f96e93d7e117393172a", 16)
    expected = bytes.fromhex("f3eed1bdb5d2a03c064b5a7e3db181f8")
    words = aes_words(key, counter, 2)
    assert b"".join(word.to_bytes(8, "little") for word in words) == expected


def test_no_block_of_the_key_stream_repeats():
    """Two counters alike under one key, or two keys alike, would show as equal 128-bit words."""
    rows = [
        secure._words(row_key(seed, group=group, step=step), block).reshape(-1, 2).copy()
        for seed in (0, 1, 1 << 127)
        for group in (0, 1)
        for step in (0, 1, 1 << 64)
        for block in (0, 1)
    ]
    words = np.concatenate(rows)
    assert len(np.unique(words, axis=0)) == len(words)


def test_keys_depend_on_every_bit_and_are_not_those_of_the_fast_generator():
    base = row_key(SEED, group=0, step=0)
    others = {row_key(SEED ^ 1 << bit, group=0, step=0) for bit in range(128)}
    others |= {row_key(SEED, group=1 << bit, step=0) for bit in range(64)}
    others |= {row_key(SEED, group=0, step=1 << bit) for bit in range(64)}
    assert len(others) == 256
    assert base not in others
    assert len(base) == 32


def test_extreme_words_stay_finite_and_reach_far_into_the_tail():
    words = np.zeros((8, BLOCK // 2), dtype=np.uint64)  # u at its smallest, angle 0
    words[:4, 1] = 2**64 - 1  # u = 1: radius 0
    words[4:, 2] = 2**63  # angle π
    out = secure._normals(words)
    furthest = 2 * math.sqrt(2 * 53 * math.log(2))  # four equal draws, halved: 17.1
    np.testing.assert_allclose(out[:3], [furthest, 0, -furthest], atol=1e-12)
    np.testing.assert_allclose(out[BLOCK // 2 :][:3], 0, atol=1e-14)
    assert np.all(np.isfinite(secure._normals(np.full_like(words, 2**64 - 1))))


@pytest.mark.parametrize("start", [0, 1, 17, 4096, BLOCK - 1, BLOCK, BLOCK + 5, 3 * BLOCK])
@pytest.mark.parametrize("length", [0, 1, 9, BLOCK, BLOCK + 1])
def test_a_slice_is_the_slice_of_the_row(start, length):
    row = draw(5 * BLOCK)
    size = 5 * BLOCK
    assert torch.equal(draw(length, start=start, size=size), row[start : start + length])
    assert torch.equal(draw(length, start=start), row[start : start + length])


def test_a_row_is_the_beginning_of_a_longer_one():
    assert torch.equal(draw(100), draw(BLOCK + 100)[:100])


def test_the_number_of_threads_changes_nothing():
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(draw(20 * BLOCK + 7, start=11))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_global_generators_are_left_alone():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), draw(50)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, draw(50))


def test_the_generator_is_named():
    normals = SecureNormals(SEED)
    assert normals.name.startswith("AES-256-CTR")
    assert normals.seed == SEED


@pytest.mark.parametrize("seed", [-1, 1 << 128, 0.5, "1", None, True])
def test_refuses_what_is_no_seed(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        SecureNormals(seed)


def test_refuses_other_devices_and_slices_that_leave_the_row():
    with pytest.raises(ValueError, match="device=meta"):
        SecureNormals(0).fill(torch.empty(3, device="meta"), group=0, step=0)
    with pytest.raises(ValueError, match="start=8"):
        draw(3, start=8, size=10)
    with pytest.raises(ValueError, match="start=-1"):
        draw(3, start=-1)
