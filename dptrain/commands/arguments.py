"""A mechanism, or its scheme and strategy, from the arguments of a command."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from dptrain.configuration import build_scheme, build_strategy, expected_batch_size, stated_size
from dptrain.core import Adjacency, did_you_mean
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

Settings = dict[str, Any]

# What the commands read of a configuration, and the fields that the group privacy has.
_READ = ("scheme", "strategy", "privacy", "steps", "epochs")
_PRIVACY = (
    *("epsilon", "delta", "noise_multiplier", "max_grad_norm", "accountant", "certificates"),
    *("secure", "noise_dtype", "regenerate_noise"),
)


def add_adjacency(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare ``--adjacency``, with dashes or underscores, and ``text`` as its help."""
    parser.add_argument(
        "--adjacency",
        type=lambda name: name.replace("-", "_"),
        choices=[each.value for each in Adjacency],
        help=text,
    )


def add_mechanism_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``read_mechanism`` and ``read_pair`` read."""
    group = parser.add_argument_group(
        "mechanism",
        "A JSON file (MatrixMechanism.to_json), or a scheme and a strategy as configurations "
        "write them: the class and its fields, e.g. --scheme MinSep batch_size=512 min_sep=16 "
        "--strategy BandMF bands=16 --dataset-size 50000 --epochs 10",
    )
    group.add_argument("mechanism", nargs="?", type=pathlib.Path, help="JSON file")
    group.add_argument(
        "--config",
        type=pathlib.Path,
        help="YAML configuration: its scheme, strategy, steps and privacy",
    )
    for name, what in (("scheme", "how batches are drawn"), ("strategy", "shape of the noise")):
        group.add_argument(
            f"--{name}", nargs="+", metavar=("TYPE", "FIELD=VALUE"), help=f"{what}: class, fields"
        )
    group.add_argument(
        "--dataset-size", type=int, help="N, number of examples; default: the scheme's nominal_size"
    )
    group.add_argument("--steps", type=int, help="n, optimizer steps")
    group.add_argument("--epochs", type=float, help="instead of --steps: n·B̄/N")


def read_mechanism(options: argparse.Namespace, noise_multiplier: float | None) -> MatrixMechanism:
    """The mechanism; a ``noise_multiplier`` replaces the file's σ, or a configuration's."""
    if options.mechanism is None:
        stated = read_privacy(options).get("noise_multiplier")
        if noise_multiplier is None and stated is not None:
            noise_multiplier = number("privacy.noise_multiplier", stated)
        if noise_multiplier is None:
            raise ValueError("--noise-multiplier is missing: set σ, or give a JSON file")
        scheme, strategy = read_pair(options)
        return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=noise_multiplier)
    for name in ("config", "scheme", "strategy", "dataset_size", "steps", "epochs"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} with {options.mechanism}: the file contains all settings; leave one of "
                "the two out"
            )
    try:
        found = MatrixMechanism.from_json(options.mechanism.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no mechanism file {options.mechanism}: create one with MatrixMechanism.to_json() or "
            "dptrain calibrate --out"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{options.mechanism} is not a mechanism ({error}): create one with "
            "MatrixMechanism.to_json() or dptrain calibrate --out"
        ) from error
    except ValueError as error:
        configuration = options.mechanism.suffix in (".yaml", ".yml")
        hint = "; give a configuration as --config" if configuration else ""
        raise ValueError(f"{options.mechanism}: {error}{hint}") from error
    return found if noise_multiplier is None else found.with_noise(noise_multiplier)


def read_pair(options: argparse.Namespace) -> tuple[Scheme, Strategy]:
    """Scheme and strategy, from a JSON file, a configuration or flags (which take precedence)."""
    if options.mechanism is not None:
        found = read_mechanism(options, None)
        return found.scheme, found.strategy
    stated = _stated(options)
    scheme = _settings("scheme", options.scheme, stated)
    strategy = _settings("strategy", options.strategy, stated)
    size = options.dataset_size
    if size is None:
        size = scheme.get("nominal_size")  # a mechanism to be accounted for needs no other
    if size is None:
        raise ValueError("--dataset-size is missing: set N, the number of examples")
    steps, epochs = options.steps, options.epochs
    if steps is None and epochs is None:
        steps, epochs = stated.get("steps"), stated.get("epochs")
    if (steps is None) == (epochs is None):
        raise ValueError(f"give exactly one of --epochs and --steps (got {epochs=}, {steps=})")
    if steps is None:
        batch = expected_batch_size(scheme, size)
        steps = max(1, round(epochs * stated_size(scheme, size) / batch))
    return (
        build_scheme(scheme, dataset_size=size, steps=steps),
        build_strategy(strategy),
    )


def read_privacy(options: argparse.Namespace) -> Settings:
    """The configuration's ``privacy`` group: its targets, noise and accountant; else empty."""
    found = _stated(options).get("privacy", {})
    if not isinstance(found, dict):
        raise ValueError(f"{options.config}: privacy={found!r} is not a group of fields")
    return found


def stated_delta(options: argparse.Namespace, scheme: Scheme) -> float:
    """δ of ``--delta``, or of the configuration, whose null is 1/(2 · protected units)."""
    if options.delta is not None:
        return float(options.delta)
    if options.config is None:
        raise ValueError("--delta is missing: set δ, or give --config")
    delta = read_privacy(options).get("delta")
    return 1 / (2 * scheme.population) if delta is None else number("privacy.delta", delta)


def number(name: str, value: Any) -> float:
    """A configuration's value as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: must be a number")
    return float(value)


def _stated(options: argparse.Namespace) -> Settings:
    if options.config is None:
        return {}
    from dptrain.configuration import read_yaml

    found = read_yaml(options.config)
    _check_names(options.config, found, _READ, "", near_only=True)
    if isinstance(privacy := found.get("privacy"), dict):
        _check_names(options.config, privacy, _PRIVACY, "privacy.")
    return found


def _check_names(
    path: pathlib.Path, stated: Settings, known: Sequence[str], group: str, near_only: bool = False
) -> None:
    """Refuse fields that nobody reads; with ``near_only``, only those close to a known name.

    A configuration of a recipe has fields of that recipe's own beside the known ones.
    """
    for name in stated:
        hint = did_you_mean(str(name), [each for each in known if each not in stated], prefix=group)
        if name not in known and (hint or not near_only):
            raise ValueError(f"{path}: unknown field {f'{group}{name}'!r}; {hint}".strip("; "))


def _settings(group: str, words: list[str] | None, stated: Settings) -> Settings:
    if words is None:
        found = stated.get(group)
        if not isinstance(found, dict):
            raise ValueError(
                f"--{group} is missing: give a JSON file of a mechanism, --config, or --{group} "
                "TYPE FIELD=VALUE ..."
            )
        return found
    settings: Settings = {}
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals and position == 0:
            settings["type"] = word
        elif not equals:
            raise ValueError(f"--{group} {word}: write FIELD=VALUE after the type")
        else:
            settings[name] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A number, true, false, null or a list; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
