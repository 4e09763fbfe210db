"""Where the normals come from: seeded, on every device, or cryptographic."""

from dptrain.noise.generators.gaussian import chunk_length, fill_normal
from dptrain.noise.generators.normals import (
    AES,
    PHILOX,
    Normals,
    SecureNormals,
    open_normals,
)

__all__ = [
    "AES",
    "PHILOX",
    "Normals",
    "SecureNormals",
    "chunk_length",
    "fill_normal",
    "open_normals",
]
