"""Where the normals come from: seeded, on every device, or cryptographic."""
