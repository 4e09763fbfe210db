"""A run with an individual filter discloses nothing about single examples unasked.

Two kinds of oracle. Noninterference: whatever the record holds, everything that is written, logged
or shown is the same to the byte. Markers: values put into the record are searched for in it.
"""

import io
import logging
import re
import struct

import numpy as np
import pytest
import torch

from dptrain.contrib.individual.report import IndividualReport
from dptrain.individual import GDPFilter, GDPOdometer, GDPRecord
from dptrain.reporting.report import conditions, privacy_report
from tests.helpers.engine import everything_every_step, images, make, small_net, train

DATA, STEPS, DELTA = images(), 6, 1e-3
N = len(DATA)
COUNTS = (77771, 88882, 99993)  # of active examples; no other number of the run looks like these
SENTENCE = "Every example had a privacy budget of its own"
# The filter's bound is the guarantee, and the plan's is.
FILTERS = {
    "filter": GDPFilter(target_epsilon=2.0, target_delta=DELTA, max_steps=STEPS),
    "odometer": GDPOdometer.for_epsilons((1.0, 2.0), target_delta=DELTA, max_steps=STEPS),
    "plan": GDPFilter(target_epsilon=50.0, target_delta=DELTA, max_steps=STEPS),
}


@pytest.fixture(params=FILTERS)
def private(request, tmp_path):
    """A run of which half has been done."""
    run = make(
        small_net(),
        DATA,
        scheme=everything_every_step(N, STEPS),
        individual=FILTERS[request.param],
        max_physical_batch_size=10,
        ledger=tmp_path / "ledger.jsonl",
        noise_multiplier=2.0,
    )
    train(run, steps=3)
    return run


def put(private, seed):
    """Another content of the record; returns the markers."""
    record = private.individual
    shares = np.random.default_rng(seed).uniform(0.9, 0.99, size=N)
    state = record.state_dict()
    name, budget = "spent", record.budget
    if isinstance(record, GDPRecord):
        name, budget = "squares", budget**2
    spent = state["spending"][name] = torch.from_numpy(shares * budget)
    record.load_state_dict(state)
    record.active_counts[:] = [count + seed for count in COUNTS]
    return np.concatenate([spent, record.spent, record.epsilons(DELTA)])


def serialized(state):
    file = io.BytesIO()
    torch.save(state, file)  # a zip without compression: numbers are there as they are
    return file.getvalue()


def public_part(private):
    return {k: v for k, v in private.state_dict().items() if k != "private"}


def shown(private):
    """Everything of the run that has a text."""
    parts = [private, private.individual, private.optimizer, private.loader, private.mechanism]
    texts = [f"{part!r} {part!s}" for part in parts]
    guarantee = private.guarantee()
    return "\n".join([*texts, str(guarantee), repr(guarantee), *conditions(guarantee)])


def reported(private, folder):
    paths = privacy_report(private.guarantee(), folder)
    return b"".join(path.read_bytes() for path in paths)


def outputs(private, folder):
    return shown(private), reported(private, folder), serialized(public_part(private))


def number(count):
    """A pattern of the whole number: the digits may be part of a digest, or of a fraction."""
    return re.compile(rb"(?<![0-9a-fA-F.])%d(?![0-9a-fA-F])" % count)


@pytest.mark.parametrize("text", [b"active: 77771", b"[77771, 2]", b"77771.0\n", b'"77771"'])
def test_numbers_are_found(text):
    assert number(77771).search(text)


def test_no_output_depends_on_the_record(private, tmp_path):
    put(private, seed=0)
    first, report = outputs(private, tmp_path), IndividualReport.of(private)
    put(private, seed=1)
    assert IndividualReport.of(private) != report  # what was asked for does
    assert outputs(private, tmp_path) == first


def test_no_log_depends_on_the_record(private, caplog, capsys, tmp_path):
    state, logs = private.state_dict(), []
    caplog.set_level(logging.DEBUG)
    for seed in (0, 1):
        private.load_state_dict(state)
        caplog.clear()
        put(private, seed)
        private.optimizer.ledger.digests[3:] = []  # or the second time would be refused
        train(private, steps=5)
        outputs(private, tmp_path)
        private.load_state_dict(private.state_dict())
        found = capsys.readouterr()
        logs.append((caplog.text, found.out, found.err))
    assert logs[0] == logs[1]


def test_no_marker_is_found(private, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    values = put(private, seed=0)
    text, report, checkpoint = outputs(private, tmp_path)
    written = (tmp_path / "ledger.jsonl").read_bytes()
    texts = (text + caplog.text).encode() + report + written
    for value in values:
        assert f"{value:.5g}".encode() not in texts
        for form in ("<d", "<f"):
            assert struct.pack(form, value) not in checkpoint
    for count in COUNTS:
        assert not number(count).search(texts)
        assert struct.pack("<i", count) not in checkpoint  # pickle's integers
    # The search would find them: they are in the private part.
    whole = serialized(private.state_dict())
    assert all(struct.pack("<d", value) in whole for value in values[:N])
    assert all(struct.pack("<i", count) in whole for count in COUNTS)


def test_no_file_is_written_unasked(private, tmp_path):
    train(private)
    private.guarantee()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_the_statement_forbids_to_release_them(private, tmp_path):
    guarantee = private.guarantee()
    assert sum(SENTENCE in line for line in conditions(guarantee)) == 1
    assert SENTENCE.encode() in reported(private, tmp_path)


def test_both_cases_are_there(private, request):
    by_filter = private.guarantee().accountant.startswith("individual ")
    assert by_filter == (request.node.callspec.params["private"] != "plan")


def test_a_run_without_a_filter_says_nothing_of_budgets():
    private = make(
        small_net(), DATA, scheme=everything_every_step(N, STEPS), target_delta=DELTA, seed=None
    )
    assert not any(SENTENCE in line for line in conditions(private.guarantee()))
