"""The base of every room: guarantees as values, checks of arguments, JSON, random seeds."""

from dptrain.core import checks
from dptrain.core.arrays import Array
from dptrain.core.devices import (
    as_on_a_device,
    exact_device,
    in_float64,
    on_processor,
    sent,
    wait_for,
)
from dptrain.core.guarantee import Adjacency, Guarantee, Kind, Unit
from dptrain.core.json_value import JsonValue, digest, parsed
from dptrain.core.module_state import (
    ModuleState,
    attribute_of,
    content_of,
    extra_states,
    memory_of,
    modules_of,
    parts_of,
    put_back,
)
from dptrain.core.open_family import checked_member
from dptrain.core.randomness import (
    global_state,
    remember_globals,
    restore_global_state,
    same_global_state,
    seed_globals,
    seeded_globals,
    split_seed,
)
from dptrain.core.text import aligned, capital, did_you_mean, duration, in_words, named_error, size

__all__ = [
    "Adjacency",
    "Array",
    "Guarantee",
    "JsonValue",
    "Kind",
    "ModuleState",
    "Unit",
    "aligned",
    "as_on_a_device",
    "attribute_of",
    "capital",
    "checked_member",
    "checks",
    "content_of",
    "did_you_mean",
    "digest",
    "duration",
    "exact_device",
    "extra_states",
    "global_state",
    "in_float64",
    "in_words",
    "memory_of",
    "modules_of",
    "named_error",
    "on_processor",
    "parsed",
    "parts_of",
    "put_back",
    "remember_globals",
    "restore_global_state",
    "same_global_state",
    "seed_globals",
    "seeded_globals",
    "sent",
    "size",
    "split_seed",
    "wait_for",
]
