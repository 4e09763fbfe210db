"""Saved states of runs: what is in them, whether they are whole, and where they lie."""

from dptrain.engine.checkpoints.divided import (
    Holder,
    check_not_in_dcp,
    read_folder,
    write_folder,
)
from dptrain.engine.checkpoints.sealed import (
    SHARE,
    check_fields,
    check_format,
    check_guarantee,
    check_seal,
    check_settings,
    noise_of,
    on_cpu,
    seal,
    shares_of,
)

__all__ = [
    "SHARE",
    "Holder",
    "check_fields",
    "check_format",
    "check_guarantee",
    "check_not_in_dcp",
    "check_seal",
    "check_settings",
    "noise_of",
    "on_cpu",
    "read_folder",
    "seal",
    "shares_of",
    "write_folder",
]
