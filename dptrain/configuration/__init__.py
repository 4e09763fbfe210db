"""Schemes and strategies as a configuration file writes them: ``type``, and its fields."""

from dptrain.configuration.schemes import (
    SIZES,
    build_scheme,
    check_scheme,
    expected_batch_size,
    stated_size,
    steps_of_epoch,
)
from dptrain.configuration.typed import (
    build_clipping,
    build_strategy,
    members_of,
    named_type,
    stated_fields,
)
from dptrain.configuration.yaml_file import Loader, one_line, read_yaml

__all__ = [
    "SIZES",
    "Loader",
    "build_clipping",
    "build_scheme",
    "build_strategy",
    "check_scheme",
    "expected_batch_size",
    "members_of",
    "named_type",
    "one_line",
    "read_yaml",
    "stated_fields",
    "stated_size",
    "steps_of_epoch",
]
