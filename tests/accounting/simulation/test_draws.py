"""SharedDraws that are shared by processes, interrupted and continued."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any

import numpy as np
import pytest

from dptrain.accounting.simulation.draws import Kept, Processes, SharedDraws
from dptrain.accounting.simulation.law import PlainLaw
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import Identity

MECHANISM = MatrixMechanism(
    scheme=MinSep(probability=0.1, min_sep=1, steps=1, dataset_size=20),
    strategy=Identity(),
    noise_multiplier=1.0,
)
TARGET = {"epsilon": 1.0, "delta": 0.02}


class Counted(PlainLaw):
    """Stops at a given draw as if by Ctrl-C, and draws small chunks."""

    stop_after: int | None = None
    drawn = 0

    def terms(self, sigma: float) -> Any:
        def both(epsilon: float) -> dict[str, WeightedTerms]:
            found = super(Counted, self).terms(sigma)(epsilon)
            return {side: self._counted(each) for side, each in found.items()}

        return both

    def _counted(self, terms: WeightedTerms) -> WeightedTerms:
        def draw(rng: np.random.Generator, size: int) -> np.ndarray:
            Counted.drawn += 1
            if Counted.stop_after is not None and Counted.drawn > Counted.stop_after:
                raise KeyboardInterrupt
            return terms.draw(rng, size)

        return WeightedTerms(terms.ceiling, 100, draw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(MinSepAnyMatrix):
    name = "small"

    def law(self, mechanism: MatrixMechanism) -> PlainLaw:
        return Counted(super().law(mechanism).losses)


@pytest.fixture(autouse=True)
def _never_stops() -> Any:
    Counted.stop_after, Counted.drawn = None, 0
    yield
    Counted.stop_after = None


def small(**options: Any) -> Small:
    return Small(**{"seed": 3, "progress": False, "threads": 1, **options})


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_certificate_is_continued_bit_for_bit(
    tmp_path: pathlib.Path, share: float, threads: int
) -> None:
    whole = small().calibrate(MECHANISM, **TARGET)
    draws = Counted.drawn
    Counted.stop_after, Counted.drawn = int(share * draws), 0
    with pytest.raises(KeyboardInterrupt, match=r"samples are kept in .*partial.*: the same call"):
        small(cache=tmp_path, threads=threads).calibrate(MECHANISM, **TARGET)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("partial-")
    assert "noise_multiplier" not in file.read_text().replace("no noise multiplier", "")
    Counted.stop_after, Counted.drawn = None, 0
    # Whatever seed is asked for: another one would be another attempt.
    assert small(cache=tmp_path, seed=77).calibrate(MECHANISM, **TARGET) == whole
    assert Counted.drawn <= (1 - share) * draws + 30 * threads  # those under way are lost
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("certificate-")


@pytest.mark.slow
def test_an_interrupted_guarantee_is_continued_bit_for_bit(tmp_path: pathlib.Path) -> None:
    whole = small().guarantee(MECHANISM, delta=0.01)
    Counted.stop_after, Counted.drawn = Counted.drawn // 2, 0
    with pytest.raises(KeyboardInterrupt, match="are kept in"):
        small(cache=tmp_path).guarantee(MECHANISM, delta=0.01)
    Counted.stop_after = None
    assert small(cache=tmp_path, seed=9).guarantee(MECHANISM, delta=0.01) == whole
    assert not list(tmp_path.iterdir())


def test_the_seed_is_on_disk_before_the_first_sample(tmp_path: pathlib.Path) -> None:
    Counted.stop_after = 0
    with pytest.raises(KeyboardInterrupt, match=r"^0 samples are kept"):
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)
    (file,) = tmp_path.iterdir()
    assert '"seed": "3"' in file.read_text()


def test_without_a_place_ctrl_c_says_what_is_lost() -> None:
    Counted.stop_after = 5
    with pytest.raises(KeyboardInterrupt, match="samples are lost; set cache to keep them"):
        small().calibrate(MECHANISM, **TARGET)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("damage", ["digit", "text", "foreign", "versions", "cut"])
def test_a_damaged_file_is_an_error_naming_it(
    tmp_path: pathlib.Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small().calibrate(MECHANISM, **TARGET)
    Counted.stop_after, Counted.drawn = Counted.drawn // 2, 0
    with pytest.raises(KeyboardInterrupt):
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)
    Counted.stop_after = None
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    words = "damaged file of an unfinished simulation"
    if damage == "digit":
        lines[3] = lines[3].replace("100,", "101,")
    elif damage == "text":
        lines[3] = "{\n"
    elif damage == "foreign":
        lines = ["some text\n"]
    elif damage == "versions":
        monkeypatch.setattr(np, "__version__", "0.0")
        words = "it was started with"
    file.write_text("".join(lines))
    if damage == "cut":  # by the end of a process: that chunk is drawn once more
        file.write_text("".join(lines)[:-5])
        assert small(cache=tmp_path).calibrate(MECHANISM, **TARGET) == whole
        return
    with pytest.raises(ValueError, match=words) as error:
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)
    assert str(file) in str(error.value)


class Threads(Processes):
    """Threads that stand for processes."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def all(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(60)
        found = list(self._board)
        self._barrier.wait(60)
        return found

    def from_first(self, work: Any) -> Any:
        return self.all(work() if self.rank == 0 else None)[0]


def together(size: int, work: Any) -> list[Any]:
    """Results of ``work(processes)`` on so many of them, at once."""
    board, barrier, found = [None] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        found[rank] = work(Threads(rank, size, board, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    return found


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_processes_make_the_certificate_of_one(tmp_path: pathlib.Path, size: int) -> None:
    whole, draws = small().calibrate(MECHANISM, **TARGET), Counted.drawn
    Counted.drawn = 0
    found = together(
        size,
        lambda team: small(
            seed=3 if team.rank == 0 else None, cache=tmp_path, together=team
        ).calibrate(MECHANISM, **TARGET),
    )
    assert found == [whole] * size
    assert Counted.drawn <= draws + 60 * 8 * size  # what a stopped verdict had no use for
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("certificate-")
    # What one process left half done, several finish.
    other = tmp_path / "other"
    Counted.stop_after, Counted.drawn = draws // 2, 0
    with pytest.raises(KeyboardInterrupt):
        small(cache=other).calibrate(MECHANISM, **TARGET)
    Counted.stop_after = None
    found = together(size, lambda team: small(cache=other, together=team).calibrate(
        MECHANISM, **TARGET))  # fmt: skip
    assert found == [whole] * size


def test_processes_with_different_questions_are_refused() -> None:
    def asked(team: Threads) -> str:
        terms = WeightedTerms(1.0 + team.rank, 10, lambda rng, size: rng.random(size))
        try:
            list(SharedDraws(1, 1, together=team).sums(terms, 100, [2]))
        except ValueError as error:
            return str(error)
        return ""

    assert all("different questions" in said for said in together(2, asked))


@pytest.mark.parametrize("stored", [False, True])
def test_processes_with_different_mechanisms_are_refused(
    tmp_path: pathlib.Path, stored: bool
) -> None:
    """Ceilings and numbers of samples without weights say nothing of the mechanism."""
    other = dataclasses.replace(MECHANISM, scheme=dataclasses.replace(MECHANISM.scheme, steps=2))
    if stored:
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)

    def asked(team: Threads) -> str:
        try:
            small(cache=tmp_path, together=team).calibrate([MECHANISM, other][team.rank], **TARGET)
        except ValueError as error:
            return str(error)
        return ""

    assert all("different questions" in said for said in together(2, asked))


def test_another_rule_does_not_go_on_with_what_was_drawn(tmp_path: pathlib.Path) -> None:
    """It declares other points, which must not follow from the samples that verify them."""
    Counted.stop_after = 5
    with pytest.raises(KeyboardInterrupt):
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)
    Counted.stop_after = None
    with pytest.raises(ValueError, match="started with another max_samples"):
        small(cache=tmp_path, max_samples=10**8).calibrate(MECHANISM, **TARGET)
    assert small(cache=tmp_path).calibrate(MECHANISM, **TARGET) == small().calibrate(
        MECHANISM, **TARGET
    )


def test_two_calls_at_once_make_one_attempt(tmp_path: pathlib.Path) -> None:
    """The second one waits, whatever its seed and number of attempts, and reads the first's."""
    found: dict[str, Any] = {}
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Counted):
        def _counted(self, terms: WeightedTerms) -> WeightedTerms:
            counted = super()._counted(terms)

            def draw(rng: np.random.Generator, size: int) -> np.ndarray:
                begun.set()
                assert go_on.wait(60)
                return counted.draw(rng, size)

            return WeightedTerms(terms.ceiling, 100, draw)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class SlowSmall(Small):
        def law(self, mechanism: MatrixMechanism) -> PlainLaw:
            return Slow(super().law(mechanism).losses)

    def first() -> None:
        member = SlowSmall(seed=3, progress=False, threads=1, cache=tmp_path, attempts=2)
        found["first"] = member.calibrate(MECHANISM, **TARGET)

    def second() -> None:
        found["second"] = small(seed=4, cache=tmp_path).calibrate(MECHANISM, **TARGET)

    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive()
    go_on.set()
    for each in threads:
        each.join(60)
    assert found["first"] == found["second"]
    assert found["first"].certificate["seed"] == "3"
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("certificate-")


def test_another_number_of_attempts_does_not_begin_beside_one_that_is_unfinished(
    tmp_path: pathlib.Path,
) -> None:
    Counted.stop_after = 5
    with pytest.raises(KeyboardInterrupt):
        small(cache=tmp_path).calibrate(MECHANISM, **TARGET)
    Counted.stop_after = None
    with pytest.raises(ValueError, match="number of attempts"):
        small(cache=tmp_path, attempts=2).calibrate(MECHANISM, **TARGET)


def test_an_end_before_the_first_line_is_no_damage(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kept").write_text("0f3a21")
    assert Kept(tmp_path / "kept", {}, [], 8).seed == 8
    assert Kept(tmp_path / "kept", {}, [], 9).seed == 8


def test_what_was_drawn_for_another_point_is_drawn_anew(tmp_path: pathlib.Path) -> None:
    terms = WeightedTerms(1.0, 10, lambda rng, size: rng.random(size))
    draws = SharedDraws(1, 1, kept=Kept(tmp_path / "kept", {}, [], 1))
    first = list(draws.sums(terms, 30, [2], 0.5))
    assert draws.kept is not None
    assert draws.kept.known == {(2, 0.5, 1.0): dict(enumerate(first))}
    assert list(draws.sums(terms, 30, [2], 0.7)) == first  # the same coins
    assert len(draws.kept.known) == 2


def test_a_term_that_is_no_number_is_an_error() -> None:
    terms = WeightedTerms(1.0, 10, lambda rng, size: np.full(size, np.nan))
    with pytest.raises(ArithmeticError, match="not a number"):
        list(SharedDraws(1, 1).sums(terms, 30, [2]))
