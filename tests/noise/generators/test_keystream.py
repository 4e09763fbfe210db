"""The key stream against other code, and what its keys hang on."""

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dptrain.noise.generators import Normals
from dptrain.noise.generators.keystream import derive_key, key_stream

SEED = 0x0123_4567_89AB_CDEF_FEDC_BA98_7654_3210
TAG = b"dptrain.noise"
BLOCK = 1 << 15


def aes_words(key, counter, count):
    """``count`` 64-bit words from a counter on: AES on every counter block by itself, no CTR."""
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    text = b"".join(aes.update((counter + i).to_bytes(16, "big")) for i in range(count // 2))
    return [int.from_bytes(text[8 * i : 8 * i + 8], "little") for i in range(count)]


def test_key_stream_is_aes_of_the_counters():
    key = bytes(range(32))
    for segment in (0, 1, 2**40):
        words = key_stream(key, segment, BLOCK)
        first = (segment << 32) + 2
        assert words[:64].tolist() == aes_words(key, first, 64)
        assert words[-64:].tolist() == aes_words(key, first + BLOCK // 2 - 32, 64)


def test_known_answer_of_the_standard():
    """NIST SP 800-38A, F.1.5 (AES-256): the block cipher is the one that the name says."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("6bc1bee22e409f96e93d7e117393172a", 16)
    expected = bytes.fromhex("f3eed1bdb5d2a03c064b5a7e3db181f8")
    words = aes_words(key, counter, 2)
    assert b"".join(word.to_bytes(8, "little") for word in words) == expected


def test_a_key_is_the_keyed_hash_of_its_numbers():
    numbers = b"".join(number.to_bytes(16, "little") for number in (3, 2**33))
    expected = hashlib.blake2b(
        numbers, key=SEED.to_bytes(16, "little"), digest_size=32, person=TAG
    ).digest()
    assert derive_key(SEED, 3, 2**33, tag=TAG) == expected


def test_no_block_of_the_key_stream_repeats():
    """Two counters alike under one key, or two keys alike, would show as equal 128-bit words."""
    rows = [
        key_stream(derive_key(seed, group, step, tag=TAG), segment, BLOCK).reshape(-1, 2).copy()
        for seed in (0, 1, 1 << 127)
        for group in (0, 1)
        for step in (0, 1, 1 << 64)
        for segment in (0, 1)
    ]
    words = np.concatenate(rows)
    assert len(np.unique(words, axis=0)) == len(words)


def test_keys_depend_on_every_bit_and_on_the_tag():
    base = derive_key(SEED, 0, 0, tag=TAG)
    others = {derive_key(SEED ^ 1 << bit, 0, 0, tag=TAG) for bit in range(128)}
    others |= {derive_key(SEED, 1 << bit, 0, tag=TAG) for bit in range(64)}
    others |= {derive_key(SEED, 0, 1 << bit, tag=TAG) for bit in range(64)}
    others.add(derive_key(SEED, 0, 0, tag=b"dptrain.rounding"))
    assert len(others) == 257
    assert base not in others


@pytest.mark.parametrize("seed", [-1, 1 << 128, 0.5, "1", None, True])
def test_refuses_what_is_no_seed(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        Normals(seed, secure=True)
