"""Random bits from a cipher, with random access: AES-256 in counter mode."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dptrain.core import checks

_SPARE_WORDS = 2  # of 64 bits: update_into asks for room for a block of AES beyond what it writes
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


def key_stream(key: bytes, segment: int, count: int) -> npt.NDArray[np.uint64]:
    """The first ``count`` words of a segment of a key's stream, shape (count,).

    AES-256 of the numbers 2^32·segment + 2, + 3, …, two words each: what AES-GCM (NIST SP 800-38D)
    encrypts zeros to with the segment's number for its nonce, because the libraries' GCM uses wider
    instructions than their CTR and takes half the time. Nobody who lacks the key can tell the words
    from random ones unless AES is broken; a segment is far shorter than 2^32 blocks, so no two
    segments share a number.

    Args:
        key: 32 bytes.
        segment: 0 ≤ segment < 2^96.
        count: at most 2^17.

    Returns:
        Memory of this thread, free to be written to, which its next call overwrites: pages that are
        new every time would cost more than the cipher.
    """
    checks.invariant(8 * count <= _LARGEST, f"{count} words are more than one segment holds")
    encryptor = Cipher(algorithms.AES(key), modes.GCM(segment.to_bytes(12, "big"))).encryptor()
    if not hasattr(_memory, "words"):
        _memory.words = np.empty(_LARGEST // 8 + _SPARE_WORDS, dtype="<u8")
        _memory.room = memoryview(_memory.words).cast("B")
    encryptor.update_into(_ZEROS[: 8 * count], _memory.room)
    words: npt.NDArray[np.uint64] = _memory.words[:count].astype(np.uint64, copy=False)
    return words
