"""Certificates that are interrupted, continued and merged."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import MinSepLosses
from dptrain.accounting.min_sep.monte_carlo import MinSepMonteCarlo
from dptrain.accounting.simulation import certificate_cache, verification
from dptrain.accounting.simulation.certificate import certificate_of, certify_noise
from dptrain.accounting.simulation.chunk_sums import BITS, Verdicts, exact_sums
from dptrain.accounting.simulation.confidence import overall_delta
from dptrain.accounting.simulation.declaration import Declaration
from dptrain.accounting.simulation.partial_certificate import (
    PartialCertificate,
    merge,
    merge_partial_files,
    ranges_of,
)
from dptrain.accounting.simulation.verification import verify_chunks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.oracles.verdict_rows import nothing_yet, verify_grid

LAW = MinSepLaw(coefficients=np.ones(1), probability=0.1, min_sep=1, steps=1, warm_start=False)


class Sampled(MinSepLosses):
    """One step taken with p = .1, in small chunks; stops at a given draw as if by Ctrl-C."""

    stop_after: int | None = None
    drawn = 0

    @property
    def lanes(self) -> int:
        return 100

    def draw(self, *arguments: Any, **options: Any) -> Any:
        type(self).drawn += 1
        if self.stop_after is not None and type(self).drawn > self.stop_after:
            raise KeyboardInterrupt
        return super().draw(*arguments, **options)


@pytest.fixture(autouse=True)
def _never_stops() -> Any:
    Sampled.stop_after, Sampled.drawn = None, 0
    yield
    Sampled.stop_after = None


def certify(**changes: Any) -> dict[str, Any]:
    arguments = dict(epsilon=1.0, delta=0.02, seed=5, threads=1, progress=False)
    return certify_noise(Sampled(LAW), **{**arguments, **changes})  # type: ignore[arg-type]


def total_draws() -> int:
    Sampled.drawn = 0
    certify()
    return Sampled.drawn


@pytest.fixture
def begun(tmp_path: pathlib.Path) -> PartialCertificate:
    """Declared, nothing done."""
    Sampled.stop_after = total_draws() - 10
    Sampled.drawn = 0
    with pytest.raises(KeyboardInterrupt):
        certify(partial=tmp_path / "begun.json")
    Sampled.stop_after = None
    declared = PartialCertificate.load(tmp_path / "begun.json").declaration
    return PartialCertificate(declaration=declared)


def share(begun: PartialCertificate, index: int, count: int) -> PartialCertificate:
    chunks = begun.declaration.chunks
    todo = range(index * chunks // count, (index + 1) * chunks // count)
    name = f"{index + 1}/{count}"
    return verify_chunks(Sampled(LAW), begun, todo, threads=1, progress=False, share=name)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("missing", [1, 5, 15])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_certificate_is_continued_bit_for_bit(
    tmp_path: pathlib.Path, missing: int, threads: int
) -> None:
    whole, draws = certify(), total_draws()
    Sampled.stop_after, Sampled.drawn = draws - missing, 0
    with pytest.raises(KeyboardInterrupt, match=r"of 2,6\d\d samples a direction are in, kept in"):
        certify(cache=tmp_path, threads=threads)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("partial-")
    kept = PartialCertificate.load(file)
    assert 0 < kept.samples < kept.declaration.samples
    Sampled.stop_after, Sampled.drawn = None, 0
    # Whatever seed is asked for: another one would be another attempt.
    assert certify(cache=tmp_path, seed=77) == whole
    assert Sampled.drawn == len(kept.missing)  # neither the estimate nor a chunk is drawn again
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("certificate-")


def test_the_declaration_is_on_disk_before_the_first_verifying_sample(
    tmp_path: pathlib.Path, begun: PartialCertificate
) -> None:
    place = tmp_path / "mine.json"
    Sampled.stop_after, Sampled.drawn = total_draws() - begun.declaration.chunks, 0
    with pytest.raises(KeyboardInterrupt, match="0 of"):
        certify(partial=place)
    kept = PartialCertificate.load(place)
    assert kept.declaration == begun.declaration
    assert not kept.done
    Sampled.stop_after = None
    assert certify(partial=place) == certify()
    assert not place.exists()


def test_without_a_place_ctrl_c_says_what_is_lost() -> None:
    Sampled.stop_after = total_draws() - 5
    Sampled.drawn = 0
    with pytest.raises(KeyboardInterrupt, match="lost; name a cache directory or a partial file"):
        certify()


def test_a_partial_file_is_no_certificate(
    tmp_path: pathlib.Path, begun: PartialCertificate
) -> None:
    some = share(begun, 0, 2)
    text = json.dumps(some.to_dict())
    assert "noise_multiplier" not in text.replace("states no noise multiplier", "")
    place = certificate_cache.path_of(tmp_path, begun.declaration.request)
    place.write_text(text)
    progress = rf"{some.samples:,} of {begun.declaration.samples:,} samples"
    for read in (
        lambda: certificate_cache.read_certificate(place),
        lambda: certify(cache=tmp_path),
    ):
        with pytest.raises(ValueError, match="not a certificate but a partial one") as error:
            read()
        assert progress in str(error.value)
    with pytest.raises(ValueError, match=rf"not a certificate yet: {progress}"):
        certificate_of(some)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("damage", ["text", "digest", "grid", "sums", "foreign", "certificate"])
def test_a_damaged_partial_file_is_an_error_naming_it(
    tmp_path: pathlib.Path, begun: PartialCertificate, damage: str
) -> None:
    value = share(begun, 0, 2).to_dict()
    if damage == "digest":
        del value["digest"]
    elif damage == "grid":
        value["declaration"]["exponents"][0] -= 1
    elif damage == "sums":
        chunk = next(iter(value["sums"]))
        value["sums"][chunk][0][-1] -= 1
    elif damage == "foreign":
        value = {"some": "thing"}
    elif damage == "certificate":
        value = certify()
    place = tmp_path / "damaged.json"
    place.write_text("{" if damage == "text" else json.dumps(value))
    with pytest.raises(ValueError, match="not a usable partial certificate") as error:
        certify(partial=place)
    assert str(place) in str(error.value)


def test_a_partial_file_of_something_else_is_refused(
    tmp_path: pathlib.Path, begun: PartialCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "other.json"
    share(begun, 0, 2).store(place)
    with pytest.raises(ValueError, match=r"other.json: the declared request .* another attempt"):
        certify(partial=place, epsilon=1.1)
    monkeypatch.setattr(np, "__version__", "0.0")
    with pytest.raises(ValueError, match="the declared versions"):
        certify(partial=place)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_shares_merge_in_any_order_to_the_certificate_of_one_process(
    begun: PartialCertificate, count: int
) -> None:
    parts = [share(begun, index, count) for index in range(count)]
    whole = certify()
    assert certificate_of(merge(parts)) == certificate_of(merge(parts[::-1])) == whole
    # What is left of a merged file with a hole in it is filled up as well.
    hole = merge([part for index, part in enumerate(parts) if index != 1])
    rest = verify_chunks(Sampled(LAW), hole, hole.missing, threads=2, progress=False)
    assert certificate_of(hole.with_chunks(rest)) == whole


def test_files_merge_and_errors_name_them(
    tmp_path: pathlib.Path, begun: PartialCertificate
) -> None:
    paths = [tmp_path / f"{index}.json" for index in range(3)]
    for index, path in enumerate(paths):
        share(begun, index, 3).store(path)
    assert certificate_of(merge_partial_files(paths)) == certify()
    with pytest.raises(ValueError, match=r"missing are chunks 9-17 \(of shards 2/3\)"):
        certificate_of(merge_partial_files([paths[0], paths[2]]))
    paths[1].write_text(paths[0].read_text())
    with pytest.raises(ValueError, match=r"0.json and .*1.json: both contain chunks 0-8"):
        merge_partial_files(paths[:2])
    with pytest.raises(FileNotFoundError):
        merge_partial_files([tmp_path / "none.json"])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_partial_files([])


@pytest.mark.parametrize("field", ["seed", "request", "versions", "sigmas", "lanes"])
def test_parts_of_different_declarations_do_not_merge(
    begun: PartialCertificate, field: str
) -> None:
    changed = begun.declaration.to_dict()
    changed[field] = {
        "seed": "6",
        "request": {**changed["request"], "epsilon": 2.0},
        "versions": {"numpy": "0"},
        "sigmas": [2 * sigma for sigma in changed["sigmas"]],
        "lanes": 101,
    }[field]
    other = PartialCertificate(declaration=Declaration.from_dict(changed))
    with pytest.raises(ValueError, match=f"different verifications: {field}"):
        merge([begun, other])


def test_shares_that_stop_early_merge_to_the_rows_of_one_process() -> None:
    """Six noise levels, most of them rejected on the way; every process stops where it may."""
    sigmas, rule = [0.4, 0.5, 0.55, 0.6, 0.7, 1.0], overall_delta(0.03, 6000)
    for grid in (sigmas, sigmas[:3]):  # with and without a σ that is accepted
        for seed in range(2):
            whole = verify_grid(Sampled(LAW), grid, epsilon=0.2, verdict=rule, seed=seed)
            empty = nothing_yet(Sampled(LAW), grid, 0.2, rule, seed)
            assert any(not row["accepted"] for row in whole)
            for count in (2, 5):
                parts = [share(empty, index, count) for index in range(count)]
                assert merge(parts[::-1]).verdicts() == whole


def test_missing_sums_of_a_standing_noise_level_are_an_error(begun: PartialCertificate) -> None:
    part = share(begun, 0, 1)
    chunk = next(iter(part.sums))
    cut = {**part.sums, chunk: tuple(row[1:] for row in part.sums[chunk])}
    broken = PartialCertificate(declaration=part.declaration, done=part.done, sums=cut)
    with pytest.raises(ValueError, match=rf"chunk {chunk}: sums of 6 noise levels where 7 stand"):
        broken.verdicts()


def test_progress_is_kept_while_it_runs(
    tmp_path: pathlib.Path, begun: PartialCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "KEEP_SECONDS", 0.0)
    kept: list[int] = []
    verify_chunks(
        Sampled(LAW), begun, begun.missing, threads=1, progress=False,
        keep=lambda partial: kept.append(len(partial.done)),
    )  # fmt: skip
    chunks = begun.declaration.chunks
    assert kept == [0, *range(1, chunks + 1), chunks]


def test_sums_are_rounded_up_and_verdicts_are_exact() -> None:
    terms = np.random.default_rng(1).random((2, 3, 400)) ** 9
    for row, sums in zip(terms, exact_sums(terms), strict=True):
        for values, found in zip(row, sums, strict=True):
            exact = math.fsum(values)
            assert exact * 2**BITS <= found <= exact * 2**BITS * (1 + 2e-12)
    with pytest.raises(ArithmeticError, match="not a number"):
        exact_sums(np.array([[[0.0, math.nan]], [[0.0, 0.0]]]))
    limit = 2**BITS // 2  # s·δ' = .5: equality is accepted, one unit more is not
    for excess, accepted in ((0, True), (1, False)):
        verdicts = Verdicts([1.0], samples=2, threshold=0.25)
        verdicts.feed(((limit,), (0,)), 1)
        if verdicts.standing:
            verdicts.feed(((excess,), (0,)), 1)
        assert verdicts.rows()[0]["accepted"] is accepted


def test_ranges() -> None:
    assert ranges_of([4, 0, 1, 2, 9]) == [(0, 3), (4, 5), (9, 10)]
    assert ranges_of([]) == []


def sampled(**options: Any) -> MinSepMonteCarlo:
    class Accountant(MinSepMonteCarlo):
        def simulation(self, mechanism: MatrixMechanism) -> Sampled:
            return Sampled(super().simulation(mechanism).law)

    return Accountant(seed=3, progress=False, threads=1, samples=3050, **options)


MECHANISM = MatrixMechanism(
    scheme=Poisson(probability=0.1, steps=1, dataset_size=20),
    strategy=Identity(),
    noise_multiplier=1.0,
)


def test_an_interrupted_guarantee_is_continued_bit_for_bit(tmp_path: pathlib.Path) -> None:
    whole = sampled().guarantee(MECHANISM, delta=0.01)
    Sampled.stop_after, Sampled.drawn = 20, 0
    with pytest.raises(KeyboardInterrupt, match=r"of 3,050 samples a direction are kept in"):
        sampled(cache=tmp_path).guarantee(MECHANISM, delta=0.01)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    Sampled.stop_after, Sampled.drawn = None, 0
    again = dataclasses.replace(sampled(cache=tmp_path), seed=9)
    assert again.guarantee(MECHANISM, delta=0.01) == whole
    assert 0 < Sampled.drawn < 20
    assert not list(tmp_path.iterdir())
    for damaged in ("{", text.replace('"seed": "3"', '"seed": "4"')):
        file.write_text(damaged)
        with pytest.raises(ValueError, match="corrupt file of an unfinished") as error:
            again.guarantee(MECHANISM, delta=0.01)
        assert str(file) in str(error.value)


def test_an_interrupted_guarantee_without_a_cache_says_what_is_lost() -> None:
    Sampled.stop_after, Sampled.drawn = 20, 0
    with pytest.raises(
        KeyboardInterrupt, match=r"of 3,050 samples a direction are lost; set cache"
    ):
        sampled().guarantee(MECHANISM, delta=0.01)


def test_deltas_that_are_not_resolved_are_refused_with_the_least() -> None:
    with pytest.raises(ValueError, match=r"delta=1e-11: the least that .* certifies is 1e-10"):
        certify(delta=1e-11)
    patient = dataclasses.replace(sampled(), max_samples=10**15, samples=None)
    for call in (
        lambda: patient.guarantee(MECHANISM, delta=1e-11),
        lambda: patient.calibrate(MECHANISM, epsilon=1.0, delta=1e-11),
    ):
        with pytest.raises(ValueError, match="least that a simulation"):
            call()
    with pytest.raises(ValueError, match=r"enough for δ of about 1\.7e-07 or more"):
        sampled().calibrate(MECHANISM, epsilon=1.0, delta=1e-9)


@pytest.mark.parametrize("side", ["remove", "add"])
def test_a_certificate_with_one_side_missing_is_corrupt(tmp_path: pathlib.Path, side: str) -> None:
    certify(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    for value in (None, ...):
        certificate = json.loads(file.read_text())
        if value is None:
            certificate["grid"][-1][side] = None
        else:
            del certificate["grid"][-1][side]
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(certificate))
        with pytest.raises(ValueError, match=f"no verdict in the {side} direction"):
            certificate_cache.read_certificate(broken)
