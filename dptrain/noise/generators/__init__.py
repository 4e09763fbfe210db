"""Where the normals come from: seeded, on every device, or cryptographic."""

from dptrain.noise.generators.gaussian import chunk_length, fill_normal
from dptrain.noise.generators.keystream import derive_key, key_stream
from dptrain.noise.generators.normals import (
    AES,
    PHILOX,
    Normals,
    SecureNormals,
    open_normals,
)
from dptrain.noise.generators.threads import for_each

__all__ = [
    "AES",
    "PHILOX",
    "Normals",
    "SecureNormals",
    "chunk_length",
    "derive_key",
    "fill_normal",
    "for_each",
    "key_stream",
    "open_normals",
]
