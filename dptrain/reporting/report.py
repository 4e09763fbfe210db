"""The privacy statement of a run as JSON and Markdown (plots: ``dptrain.reporting.plots``).

Everything here may be published with the model: a statement is made of a
``Guarantee`` and a ``Profile``, which hold no
number that depends on the training examples and no seed of the sampler or the noise.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, assert_never

from dptrain.accounting import Profile, TradeOff, profile_of
from dptrain.core import Adjacency, Guarantee, Kind, checks
from dptrain.noise.generators import AES, PHILOX, SECURE
from dptrain.reporting.plots import plot_curves, plot_privacy
from dptrain.reporting.publication.plain_words import plain_words
from dptrain.reporting.publication.run_facts import RunFacts, rows_of_facts
from dptrain.reporting.publication.whole_statement import FORMAT, PROVEN, read_statement, schema
from dptrain.reporting.published_profile import as_shown, chance, positive, rows_of

__all__ = [
    "as_shown",
    "conditions",
    "plot_curves",
    "plot_privacy",
    "privacy_report",
    "schema",
    "statement",
]

STATEMENT = "privacy_report.json"
"""The privacy statement for programs, in the folder of a run."""
STATEMENT_TEXT = "privacy_report.md"
"""The privacy statement for people, in the folder of a run."""

DECLARED = "Stated by the trainer; none of it follows from the numbers above."
_LONGEST_CELL = 1000  # characters of a text in a table

_COMMON = (
    "The guarantee covers the training examples only. Anything else that was learned from them "
    "(the choice of hyperparameters, of the model or of the number of steps, preprocessing fitted "
    "to them) is not covered, unless it used public information or a privacy budget of its own.",
    "It covers everything that is computed from the noisy updates: the final model, every "
    "intermediate model, and all that follows from them.",
    "It assumes that the training loop treated every example separately: the loss is the mean or "
    "the sum of one loss per example, nothing before the model combines several examples, no state "
    "is carried from batch to batch, and no setting (learning rate, clipping norm) was chosen by "
    "looking at the training batches. The run refuses what it can detect of this; the trainer "
    "answers for the rest.",
    "It does not cover checkpoints, seeds, generator states, contents or sizes of batches, or "
    "metrics of the training batches. They must not be released.",
)
_IDEAL = (
    "The analysis assumes that the noise is exactly Gaussian and that all random numbers are "
    "independent."
)
_ROUNDED = (
    "Its numbers are pseudorandom normals, rounded to a public grid on which the noisy sums are "
    "released; the notes state what this adds to ε and δ."
)
_BATCHES = (
    "Batches were drawn by PCG64-DXSM, a statistical and not a cryptographic pseudorandom "
    "generator (a scheme from another package may use its own)."
)
_INDIVIDUAL = (
    "Every example had a privacy budget of its own. The budget that each example has spent, which "
    "examples were active in a step and how many are computed from the raw examples: they are not "
    "covered and must not be released."
)
_PUBLIC = "The number of examples N, the expected batch size and all fields below are public."
_MORE = {
    Kind.VERIFIED: "The noise level was tested by simulation against a grid that was fixed "
    "beforehand; the probability that a wrong level was accepted is part of δ.",
    Kind.CONFIDENCE: "The noise level was fixed and ε is a bound by simulation: it is wrong with "
    "at most the stated probability, over the simulation and not over the training.",
    Kind.ESTIMATE: "This is an estimate. It must not be published as a guarantee.",
}


def conditions(guarantee: Guarantee) -> list[str]:
    """The conditions of the statement, in sentences."""
    found = [*_COMMON, _randomness(guarantee.noise_generator), _data_sets(guarantee.adjacency)]
    if guarantee.unit.kind == "example":
        found.append(
            "It is about one example: a person who contributed several examples is protected "
            "less, because their privacy losses add up."
        )
    if _is_individual(guarantee):
        found.append(_INDIVIDUAL)
    if guarantee.kind in _MORE:
        found.append(_MORE[guarantee.kind])
    if guarantee.kind is Kind.ESTIMATE and guarantee.notes:
        notes = "; ".join(note.rstrip(".") for note in guarantee.notes)
        found.append(f"What is known about this estimate: {notes}.")
    return found


def _is_individual(guarantee: Guarantee) -> bool:
    """True if an individual filter ran: it is the accountant, or a note says so."""
    said = (guarantee.accountant, *guarantee.notes)
    return any(text.startswith(("individual ", "An individual filter ")) for text in said)


def _data_sets(adjacency: Adjacency) -> str:
    """The difference in size of the two data sets, and what therefore is public."""
    match adjacency:
        case Adjacency.ZERO_OUT:
            return (
                "N is the same for both data sets: leaving a contribution out means replacing it "
                f"by zero. {_PUBLIC}"
            )
        case Adjacency.ADD_REMOVE:
            return (
                "The two data sets differ in size by one, so the number of examples is private: "
                "this statement neither contains it nor depends on it, and it must not be "
                "published. The nominal size, which is used in its place, and all fields below are "
                "public. The sum of a step was divided by the expected batch size of that many "
                "examples."
            )
        case Adjacency.REPLACE_ONE:
            return f"The two data sets have the same size. {_PUBLIC}"
        case _:
            assert_never(adjacency)


def _randomness(generator: str | None) -> str:
    """The distance of the run's random numbers from the ideal ones of the analysis, in words."""
    if generator is None:
        return (
            f"{_IDEAL} A computer only approximates both: by floating-point numbers and a "
            "pseudorandom generator."
        )
    if SECURE in generator:
        return (
            f"{_IDEAL} The noise was drawn by {generator}: a cryptographic generator on every "
            f"device. {_ROUNDED} {_BATCHES}"
        )
    what = "a cryptographic generator"
    if PHILOX in generator:
        plain = "a statistical and not a cryptographic one (secure=True uses a cryptographic one)"
        what = plain if AES not in generator else f"{what} on the CPU, {plain} on CUDA"
    return f"{_IDEAL} The noise was drawn by {generator}: {what}. {_ROUNDED} {_BATCHES}"


def statement(
    guarantee: Guarantee,
    profile: Profile | None = None,
    facts: RunFacts | None = None,
    date: datetime.date | None = None,
) -> dict[str, Any]:
    """The statement as a JSON-ready value; ``Guarantee.from_json`` reads its ``guarantee``.

    The arguments are those of ``privacy_report``.
    """
    _check_size_untold(guarantee)
    date = datetime.datetime.now(datetime.UTC).date() if date is None else date
    checks.instance("date", date, datetime.date, example="datetime.date(2026, 12, 31)")
    value: dict[str, Any] = {
        "format": FORMAT,
        "date": date.strftime("%Y-%m-%d"),
        "sentence": str(guarantee),
        "guarantee": json.loads(guarantee.to_json()),
        "conditions": conditions(guarantee),
        "software": {
            "dptrain": _version("dptrain"),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
    }
    if facts is not None:
        value["run"] = facts.to_dict()
    shown, proven, refused = _curves(guarantee, profile)
    limits = TradeOff.of(guarantee, proven)
    value["attacks"] = {"sentence": str(limits), **limits.summary(), "curve_refused": refused}
    if shown is not None:
        value["profile"] = _columns(shown)
    if proven is not None and proven is not shown:
        value["proven_profile"] = _columns(proven)
    return value


def _curves(
    guarantee: Guarantee, profile: Profile | None
) -> tuple[Profile | None, Profile | None, str | None]:
    """The curve that is shown, the proven one behind attacks, and the reason why there is none."""
    if guarantee.kind is Kind.ESTIMATE:
        shown = None if profile is None else as_shown(profile, guarantee)
        return shown, None, "an estimate has no curve that is proven"
    proven, refused = profile, None
    if profile is None or profile.kind not in PROVEN:
        try:
            proven = profile_of(guarantee)
        except ValueError as error:
            proven, refused = None, f"{error}"
    given = proven if profile is None else profile
    if given is None:
        return None, None, refused
    shown = as_shown(given, guarantee)
    if given is proven and shown.kind in PROVEN:
        return shown, shown, None
    # A curve that needed what a simulation showed is no proof any more.
    return shown, None if proven is None else positive(proven), refused


def _columns(profile: Profile) -> dict[str, Any]:
    return {
        "epsilon": profile.epsilon.tolist(),
        "delta_remove": profile.remove.tolist(),
        "delta_add": profile.add.tolist(),
        "kind": profile.kind.value,
        "accountant": profile.accountant,
        "failure_probability": profile.failure_probability,
    }


def privacy_report(
    guarantee: Guarantee,
    path: str | pathlib.Path,
    *,
    profile: Profile | None = None,
    facts: RunFacts | None = None,
    date: datetime.date | None = None,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the privacy statement as ``.json`` and ``.md``.

    What an attack can reach follows from a proven profile, which often proves far less than ε and δ
    do alone. One that takes no longer than seconds is worked out here. Where it would take minutes
    the statement says so, and how it is had; ``profile=`` takes it.

    Args:
        guarantee: what is promised.
        path: a folder (the files are called ``STATEMENT`` and ``STATEMENT_TEXT``), or a path
            without suffix.
        profile: δ(ε) of the same mechanism, to be part of the statement; by default
            ``profile_of(guarantee)``, where there is one.
        facts: what else is known of the run, the names of model and organization among it.
        date: of the statement; by default today, in UTC.

    Returns:
        The paths of the two files.

    Raises:
        TypeError: if ``date`` is no date.
        ValueError: if the guarantee is about adding or removing an example and tells how many
            there are, or the profile is about something else.
    """
    stem = pathlib.Path(path)
    if stem.is_dir():
        stem = stem / pathlib.Path(STATEMENT).stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    value = statement(guarantee, profile, facts, date)
    as_json, as_text = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md")
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    as_json.write_text(text + "\n", encoding="utf-8")
    as_text.write_text(statement_text(value), encoding="utf-8")
    return as_json, as_text


def _check_size_untold(guarantee: Guarantee) -> None:
    told = {"dataset_size", "graph"} & set(guarantee.scheme)
    unnamed = guarantee.scheme.get("nominal_size") is None
    if not guarantee.adjacency.public_size and (told or unnamed):
        raise ValueError(
            f"adjacency={guarantee.adjacency.value!r} with the scheme {_inline(guarantee.scheme)}: "
            "the number of examples is private under it, but this scheme's runs divide by it and "
            "its statements print it. Train with a scheme that has nominal_size="
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(version unknown: not installed)"


def statement_text(value: Mapping[str, Any]) -> str:
    """A statement as Markdown: all of it follows from the whole value, so both say the same."""
    read = read_statement(value)
    guarantee, limits, profile = read.guarantee, read.limits, read.profile
    generator = guarantee.noise_generator
    fields = {
        "ε": f"{guarantee.epsilon:.6g}",
        "δ": f"{guarantee.delta:.6g}",
        "protected unit": guarantee.unit.noun,
        "neighboring data sets": f"differ in that {guarantee.adjacency.sentence(guarantee.unit)} "
        f"({guarantee.adjacency.value})",
        "how it was shown": guarantee.kind.sentence,
        "accountant": guarantee.accountant,
        "noise multiplier σ": f"{guarantee.noise_multiplier:.6g}",
        "steps planned": guarantee.steps_planned,
        "steps executed": "none yet"
        if guarantee.steps_executed is None
        else guarantee.steps_executed,
        "sampling": _inline(guarantee.scheme),
        "noise correlation": _inline(guarantee.strategy),
        **({"noise generator": _inline(generator)} if generator else {}),
        "strategy hash": f"`{guarantee.strategy_hash}`",
        "mechanism hash": f"`{guarantee.mechanism_hash}`",
    }
    parts = [
        "# Privacy statement",
        *(
            f"**{question}.** {answer}"
            for question, answer in plain_words(guarantee, limits, read.facts, read.date)
        ),
        "## The guarantee",
        str(guarantee),
        "## What ran",
        _table(("field", "value"), fields.items()),
    ]
    if read.facts is not None:
        parts += [
            "## What was declared",
            DECLARED,
            _table(
                ("field", "value"),
                [(name, _inline(told)) for name, told in rows_of_facts(read.facts)],
            ),
        ]
    if guarantee.certificate is not None:
        parts += [
            "## Certificate",
            "Evidence for the verdict, enough to repeat it:",
            _table(
                ("field", "value"),
                [(k, _inline(v)) for k, v in sorted(guarantee.certificate.items())],
            ),
        ]
    parts += ["## What an attack can reach", str(limits), *curve_words(read.refused)]
    parts += ["## Conditions", "\n".join(f"- {line}" for line in conditions(guarantee))]
    if profile is not None:
        parts += [
            "## δ at other ε",
            f"{_profile_caption(profile)} (accountant: {profile.accountant}).",
            _table(("ε", "δ, contribution removed", "δ, contribution added"), rows_of(profile, 9)),
        ]
    parts.append(written_by(value))
    return "\n\n".join(parts) + "\n"


def written_by(value: Mapping[str, Any]) -> str:
    """The versions of the programs that wrote a statement, in a sentence."""
    return "Written by " + ", ".join(f"{k} {v}" for k, v in value["software"].items()) + "."


def curve_words(refused: str | None) -> list[str]:
    """The reason why no curve is behind what an attack can reach, in a sentence; none if one is."""
    if refused is None:
        return []
    return [
        "These limits follow from ε and δ alone, without a curve δ(ε), and the true ones may be "
        f"far lower. The reason: {refused.rstrip('.')}."
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _inline(value: Any) -> str:
    """One table cell: short values as they are, mappings by field, long lists and texts cut."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_inline(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            return f"{len(value)} entries; see the JSON"
        shown = ", ".join(_inline(item) for item in value[:8])
        return (
            f"[{shown}]" if len(value) <= 8 else f"[{shown}, … {len(value)} in all; see the JSON]"
        )
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and len(value) > _LONGEST_CELL:  # such as a packed matrix
        value = f"{value[:24]}… {len(value)} characters in all; see the JSON"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _profile_caption(profile: Profile) -> str:
    kind = profile.kind
    if kind is Kind.CONFIDENCE:
        together = ""
        if profile.failure_probability is not None:
            together = f" (the chance that not all of them hold is at most {chance(profile)})"
        return (
            f"Upper confidence bounds by simulation{together}, for orientation; the guarantee is "
            "the statement above"
        )
    if kind is Kind.ESTIMATE:
        return "Estimates, for orientation; the guarantee is the statement above"
    return f"Every line is {kind.sentence}"
