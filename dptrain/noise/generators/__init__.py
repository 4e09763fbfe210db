"""The sources of the normals: seeded, on every device, or cryptographic."""

from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.normals import AES, PHILOX, SECURE, Normals, chunk_length
from dptrain.noise.generators.threads import for_each

__all__ = [
    "AES",
    "PHILOX",
    "SECURE",
    "Normals",
    "chunk_length",
    "derive_key",
    "for_each",
    "key_stream",
]
