import dataclasses
import json

import pytest

from dptrain.core.guarantee import Adjacency, Guarantee, Kind, Unit

BASE = Guarantee(
    epsilon=1.5,
    delta=1e-5,
    unit=Unit(),
    adjacency=Adjacency.ZERO_OUT,
    scheme={"type": "Poisson", "probability": 0.1, "dataset_size": 50, "steps": 7},
    strategy={"type": "Identity"},
    strategy_hash="ab" * 32,
    noise_multiplier=1.25,
    steps_planned=7,
    accountant="pld",
    kind=Kind.EXACT,
    mechanism_hash="cd" * 32,
)


@pytest.mark.parametrize(
    "guarantee",
    [
        BASE,
        BASE.after(3),
        dataclasses.replace(BASE, epsilon=float("inf"), kind=Kind.UPPER_BOUND),
        dataclasses.replace(
            BASE,
            unit=Unit(kind="user", max_examples=4),
            adjacency=Adjacency.REPLACE_ONE,
            kind=Kind.VERIFIED,
            certificate={"seeds": ["1f"], "grid": [1.0, 1.01]},
            notes=("one", "two"),
        ),
        BASE.drawn_by("Philox"),
    ],
)
def test_json_round_trip(guarantee):
    text = guarantee.to_json()
    assert Guarantee.from_json(text) == guarantee
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_sentence_says_what_when_and_for_whom():
    text = str(BASE)
    for part in ("ε = 1.5", "δ = 1e-05", "each training example", "Poisson", "7 noisy updates"):
        assert part in text
    assert "3 of them have run; the guarantee is the planned one" in str(BASE.after(3))
    assert "all of them have run" in str(BASE.after(7))
    user = dataclasses.replace(BASE, unit=Unit(kind="user", max_examples=4))
    assert "user with up to 4 training examples" in str(user)
    estimate = dataclasses.replace(BASE, kind=Kind.ESTIMATE)
    assert "WITHOUT PROOF" in str(estimate)
    assert "With a condition." in str(BASE.with_notes("with a condition"))


def test_the_generator_is_named_where_it_is_known():
    assert ", drawn by" not in str(BASE)
    assert BASE.noise_generator is None
    named = BASE.drawn_by("AES-256-CTR")
    assert "σ = 1.25, drawn by AES-256-CTR. The statement is" in str(named)
    assert dataclasses.replace(named, noise_generator=None) == BASE
    value = json.loads(BASE.to_json())
    del value["noise_generator"]  # what was written before there was this field
    assert Guarantee.from_json(json.dumps(value)) == BASE


USER = Unit(kind="user", max_examples=4)
PLAIN = {
    (Unit(), Adjacency.ZERO_OUT): [
        "the contribution of any one training example is protected",
        "the number of examples is not protected",
    ],
    (Unit(), Adjacency.ADD_REMOVE): [
        "any one training example, including whether it was in the data"
    ],
    (Unit(), Adjacency.REPLACE_ONE): [
        "the content of any one training example is protected",
        "the number of examples is not protected",
    ],
    (USER, Adjacency.ZERO_OUT): [
        "any one user contributed is protected (at most 4 examples, copies included)."
    ],
    (USER, Adjacency.ADD_REMOVE): [
        "any one user contributed is protected (at most 4 examples, copies included)."
    ],
    (USER, Adjacency.REPLACE_ONE): [
        "any one user contributed is protected (at most 4 examples, copies included)",
        ", but not that the user contributed",
    ],
}


@pytest.mark.parametrize(("unit", "adjacency"), PLAIN)
def test_plain_words_say_who_is_protected_and_what_is_not(unit, adjacency):
    guarantee = dataclasses.replace(BASE, unit=unit, adjacency=adjacency)
    text = guarantee.plain
    assert text in str(guarantee)
    assert text.startswith("In plain words, to the extent given by ε and δ: ")
    for part in PLAIN[unit, adjacency]:
        assert part in text
    if unit.kind == "user":
        assert "Which examples belong to which users counts as public and is not protected" in text
        assert "left out to keep to this bound were not used in training" in text
        assert "The protection of a user does not depend on what other users contributed" in text
        assert "whether" not in text  # the graph is public under any relation
    else:
        assert "Several examples of one person are protected individually, not together" in text
    # N is private where an example may be added or removed.
    silent = adjacency is Adjacency.ADD_REMOVE or unit.kind == "user"
    assert ("the number of examples is" in text) is not silent
    assert len(text.split()) < 75


def test_plain_words_do_not_promise_what_is_not_there():
    one = dataclasses.replace(BASE, unit=Unit(kind="user", max_examples=1))
    assert "at most 1 example, copies included" in one.plain
    for nothing in ({"epsilon": float("inf")}, {"delta": 1.0}):
        text = dataclasses.replace(BASE, **nothing).plain
        assert text == "In plain words: nothing and nobody is protected."
    estimate = dataclasses.replace(BASE, kind=Kind.ESTIMATE)
    assert (
        "to the extent given by ε and δ, if the estimate is right: the contribution"
        in estimate.plain
    )


def test_plain_words_are_no_field():
    """Statements that were written before are read, and the other way round."""
    assert set(json.loads(BASE.to_json())) == {
        field.name for field in dataclasses.fields(Guarantee)
    }
    assert "plain" not in json.loads(BASE.to_json())


@pytest.mark.parametrize("kind", Kind)
def test_caveats_leave_an_estimate(kind):
    rough = dataclasses.replace(BASE, kind=kind).drawn_by("Philox", caveats=("it is rounded",))
    assert rough.kind is Kind.ESTIMATE
    assert rough.notes == ("it is rounded",)
    assert "WITHOUT PROOF" in str(rough)


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize("kind", Kind)
def test_every_adjacency_and_kind_has_words(adjacency, kind):
    text = str(dataclasses.replace(BASE, adjacency=adjacency, kind=kind))
    assert adjacency.sentence(Unit()) in text
    assert kind.sentence in text


def test_unknown_fields_and_values_are_refused():
    value = json.loads(BASE.to_json())
    with pytest.raises(ValueError, match="epsilonn"):
        Guarantee.from_json(json.dumps({**value, "epsilonn": 1}))
    with pytest.raises(ValueError, match="adjacen"):
        Guarantee.from_json(json.dumps({k: v for k, v in value.items() if k != "adjacency"}))
    with pytest.raises(ValueError, match="guess"):
        Guarantee.from_json(json.dumps({**value, "kind": "guess"}))


@pytest.mark.parametrize("fields", [{"kind": "group"}, {"kind": "user", "max_examples": 0}])
def test_bad_units(fields):
    with pytest.raises(ValueError, match=r"group|max_examples"):
        Unit(**fields)
    with pytest.raises(ValueError, match="user"):
        Unit(kind="example", max_examples=2)
