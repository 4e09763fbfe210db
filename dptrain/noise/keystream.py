"""Random bits from a cipher, with random access: AES-256 in counter mode."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_BLOCK_WORDS = 2  # of 64 bits; what AES encrypts for one value of the counter
_LARGEST = 1 << 20  # bytes that one call may ask for
_ZEROS = memoryview(bytes(_LARGEST))  # the "plaintext": what comes out is the key stream itself
_memory = threading.local()


def derive_key(seed: int, *numbers: int, tag: bytes) -> bytes:
    """A 256-bit key: keyed BLAKE2b of the numbers, 16 little-endian bytes each.

    Args:
        seed: 0 ≤ seed < 2^128, the key of the hash.
        numbers: what the key is for; two keys are equal only if BLAKE2b collides.
        tag: at most 16 bytes that no other user of the seed has.
    """
    return hashlib.blake2b(
        b"".join(number.to_bytes(16, "little") for number in numbers),
        key=seed.to_bytes(16, "little"),
        digest_size=32,
        person=tag,
    ).digest()


def key_stream(key: bytes, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Words ``first``, …, ``first + count - 1`` of a key's stream, shape (count,).

    AES-256-CTR of zeros from counter 0 on: nobody who lacks the key can tell the words from random
    ones unless AES is broken, and the counter, 128 bits wide, does not come round.

    Args:
        key: 32 bytes.
        first: even, since AES yields two words at a time.
        count: at most 2^17.

    Returns:
        Memory of this thread, free to be written to, which its next call overwrites: pages that are
        new every time would cost more than the cipher.
    """
    assert first % _BLOCK_WORDS == 0, first
    assert 8 * count <= _LARGEST, count
    counter = (first // _BLOCK_WORDS).to_bytes(16, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    if not hasattr(_memory, "words"):
        # update_into asks for a block to spare.
        _memory.words = np.empty(_LARGEST // 8 + _BLOCK_WORDS, dtype="<u8")
    encryptor.update_into(_ZEROS[: 8 * count], memoryview(_memory.words).cast("B"))
    return _memory.words[:count].astype(np.uint64, copy=False)
