"""The support table: what is asked is what answers."""

import pytest

from dptrain.accounting import account, accountants_for, find_accountants, registered_accountants
from dptrain.core.guarantee import Adjacency
from dptrain.core.json_value import JsonValue
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting.support_table import (
    as_markdown,
    representative_schemes,
    representative_strategies,
    support_table,
)
from dptrain.sampling import Scheme


def test_every_scheme_and_every_accountant_appears():
    schemes = {type(scheme) for scheme in representative_schemes().values()}
    own = {
        s
        for s in JsonValue._families[Scheme._family].values()
        if s.__module__.startswith("dptrain.")
    }
    assert schemes == own
    named = {answer.accountant for row in support_table() for answer in row.answers}
    # Accountants that no representative reaches would be missing from the documentation.
    assert named == {member.name for member in registered_accountants()}


def test_rows_are_what_the_dispatch_table_answers():
    strategies = representative_strategies()
    schemes = {adjacency: representative_schemes(adjacency) for adjacency in Adjacency}
    for row in support_table():
        mechanism = MatrixMechanism(
            scheme=schemes[row.adjacency][row.scheme],
            strategy=strategies[row.strategy],
            noise_multiplier=2.0,
        )
        found = accountants_for(mechanism, adjacency=row.adjacency)
        assert {a.accountant for a in row.answers} == {a.name for a in found if a.refusal is None}
        automatic = {a.accountant for a in row.answers if not a.by_name}
        if automatic:
            chosen = find_accountants(mechanism, adjacency=row.adjacency)
            assert automatic == {member.name for member in chosen}
        else:
            with pytest.raises(ValueError, match="no accountant covers"):
                account(mechanism, delta=1e-6, adjacency=row.adjacency)


def test_pairs_without_a_theorem_have_no_automatic_answer():
    rows = {(r.scheme, r.strategy, r.adjacency): r for r in support_table()}
    for pair in (
        ("Shuffled", "dense", Adjacency.ADD_REMOVE),
        ("UserFixed", "dense", Adjacency.REPLACE_ONE),
        ("MinSep, max_batch_size", "bands > b", Adjacency.ZERO_OUT),
    ):
        assert not [a for a in rows[pair].answers if not a.by_name]


def test_the_markdown_names_every_scheme_and_every_accountant():
    lines = as_markdown().splitlines()
    for row in support_table():
        if row.answers:
            mine = [line for line in lines if row.strategy in line]
            for answer in row.answers:
                assert any(f"{answer.accountant} (" in line for line in mine)
            assert any(line.startswith(f"| `{row.scheme.partition(',')[0]}`") for line in lines)
