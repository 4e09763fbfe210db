"""Comparing schemes and strategies at the same (ε, δ)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator

from tqdm.auto import tqdm

from dptrain.accounting import Accountant, Cost, accountant_named, accountants_for, find_accountants
from dptrain.accounting.base import DeterministicAccountant, told_once
from dptrain.accounting.min_sep import (
    MinSepImportance,
    TiltedEstimate,
    min_sep_law,
    min_sep_refusal,
    often_cut,
    whole_batches,
)
from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.amplified import amplified_settings
from dptrain.planning.candidates import (
    Candidate,
    first_candidates,
    further_separations,
    with_cut_batches,
)
from dptrain.planning.estimate import estimate_noise
from dptrain.planning.plan import Plan, PlanRow, Skipped
from dptrain.planning.question import Question
from dptrain.planning.strategy_table import noise_cost
from dptrain.strategies import Strategy

_QUICK = (Cost.INSTANT, Cost.SECONDS)


def compare(
    question: Question,
    *,
    accountant: str | None = None,
    slow: bool = False,
    timed: bool = True,
    certify: bool = False,
    certificates: str | os.PathLike[str] | None = None,
    progress: bool = True,
    found: Callable[[Plan], None] | None = None,
) -> Plan:
    """Find the noise of every scheme and strategy for the question's (ε, δ), and compare errors.

    Deterministic accountants are asked where they are quick; what only a simulation covers, or a
    simulation covers better, gets an estimate. A scheme that states ``min_sep`` is tried with what
    it proposes; then the best of these with wider separations. Where the best of a scheme has
    bands, its matrix is chosen for the sampling (``amplified_band_mf``), which is tried with wider
    separations too. The best of all of these is tried with batches of constant size.

    Args:
        question: the run.
        accountant: the only accountant to ask, by name; by default all that apply.
        slow: also ask deterministic accountants that take minutes.
        timed: measure the time of a step of noise.
        certify: while an estimate is best, certify it (minutes, by simulation). δ includes the
            chance that any of the certificates is wrong, as many as there are estimates.
        certificates: folder of certificates for that, which training can reuse.
        progress: show progress bars.
        found: is given the plan so far after every pair.

    Raises:
        ValueError: if the accountant is unknown, or nothing can be computed.
    """
    search = _Trials(question, accountant, slow, timed)
    rows: list[PlanRow] = []
    skipped: list[Skipped] = []

    def run(candidates: Iterable[Candidate]) -> None:
        bar = tqdm(list(candidates), disable=not progress, delay=1.0, leave=False, unit="pair")
        for candidate in bar:
            bar.set_description(f"{candidate.scheme_name} with {candidate.strategy_name}")
            for each in search.try_out(candidate):
                rows.append(each) if isinstance(each, PlanRow) else skipped.append(each)
            if found is not None:
                found(_plan(question, rows, skipped))

    run(first_candidates(question))
    spaced = {row.candidate.scheme["type"] for row in rows if "min_sep" in row.candidate.scheme}
    for kind in sorted(spaced):
        run(further_separations(question, _best(rows, kind).candidate))
    for kind in sorted({row.candidate.scheme["type"] for row in rows}):
        chosen = amplified_settings(question, _best(rows, kind).mechanism, progress=progress)
        run(Candidate(_best(rows, kind).candidate.scheme, each) for each in chosen)
        if chosen and kind in spaced:
            run(further_separations(question, _best(rows, kind).candidate))
    for kind in sorted(spaced):
        run(with_cut_batches(question, _best(rows, kind).candidate))
    if not rows:
        reasons = "; ".join(dict.fromkeys(each.reason for each in skipped))
        raise ValueError(f"no pair of scheme and strategy could be computed: {reasons}")
    plan = _plan(question, rows, skipped)
    # Which of the certificates is used follows from what they say: any may be the wrong one.
    attempts = max(1, sum(row.is_estimate and row.eligible for row in rows))
    while certify and plan.best is not None and plan.best.is_estimate:
        plan = _certified(plan, plan.best, certificates, progress, attempts)
        if found is not None:
            found(plan)
    return plan


def _plan(question: Question, rows: list[PlanRow], skipped: list[Skipped]) -> Plan:
    return Plan(question, tuple(sorted(rows, key=lambda row: row.error)), tuple(skipped))


def _best(rows: list[PlanRow], scheme: str) -> PlanRow:
    found = [row for row in rows if row.candidate.scheme["type"] == scheme]
    return min(found, key=lambda row: row.error)


def _certified(
    plan: Plan,
    row: PlanRow,
    folder: str | os.PathLike[str] | None,
    progress: bool,
    attempts: int,
) -> Plan:
    """The plan with one estimate replaced by a certified σ; ``attempts`` of these may be made."""
    member = row.accountant
    assert isinstance(member, SimulatedAccountant)
    member = dataclasses.replace(member, cache=folder, progress=progress).among(attempts)
    q = plan.question
    with told_once():
        shown = member.calibrate(row.mechanism.participants, epsilon=q.epsilon, delta=q.delta)
    certified = dataclasses.replace(
        row, mechanism=row.mechanism.with_noise(shown.noise_multiplier), kind=shown.kind
    )
    rows = [certified if each is row else each for each in plan.rows]
    return _plan(q, rows, list(plan.skipped))


@dataclasses.dataclass(frozen=True)
class _Trials:
    """The answers of accountants for one candidate after the other."""

    question: Question
    accountant: str | None
    slow: bool
    timed: bool
    # By target: what estimated σ last, and that σ. The next pair is similar, and so is its tilt.
    _tilted: dict[float, tuple[TiltedEstimate, float | None]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.accountant is not None:
            accountant_named(self.accountant)  # an unknown name at once; a known one may refuse

    def try_out(self, candidate: Candidate) -> Iterator[PlanRow | Skipped]:
        """Rows of the candidate: the least deterministic σ and, if none is exact, an estimate."""
        q = self.question
        try:
            mechanism = candidate.mechanism(q)
            members, offered, automatic = self._members(mechanism)
        except ValueError as error:
            yield Skipped(candidate, str(error))
            return
        asked = mechanism.participants
        results: list[tuple[float, Kind, Accountant]] = []
        exact = False
        for member in sorted(members, key=lambda each: each.kind_of(asked) is not Kind.EXACT):
            if not isinstance(member, DeterministicAccountant) or member.name not in offered:
                continue
            if not self.slow and (cost := member.cost(asked)) not in _QUICK:
                yield Skipped(
                    candidate, f"{member.name} would take {cost.value}; add --slow to include it"
                )
                continue
            try:
                with told_once():
                    shown = member.calibrate(asked, epsilon=q.epsilon, delta=q.delta)
            except ValueError as error:
                yield Skipped(candidate, str(error))
            else:
                results.append((shown.noise_multiplier, shown.kind, member))
                if exact := shown.kind is Kind.EXACT:
                    break  # nobody can show less
        if results:
            sigma, kind, best = min(results, key=lambda result: result[0])
            yield self._row(candidate, mechanism.with_noise(sigma), best, automatic, kind)
        if not exact:
            yield from self._estimated(candidate, mechanism, members, automatic, results)

    def _estimated(
        self,
        candidate: Candidate,
        mechanism: MatrixMechanism,
        members: list[Accountant],
        automatic: set[str],
        results: list[tuple[float, Kind, Accountant]],
    ) -> Iterator[PlanRow | Skipped]:
        """The row of a simulation that covers the pair, if its noise is less than is proven."""
        asked = mechanism.participants
        simulating = [
            member
            for member in members
            if isinstance(member, SimulatedAccountant)
            and (member.name in automatic or member.cost(asked) is not Cost.HOURS)
        ]
        if not simulating:
            if not results:
                yield Skipped(candidate, "no accountant covers it in reasonable time")
            return
        states = next((m for m in simulating if m.name in automatic), simulating[0])
        target = self.question.delta  # certificates show nearly that
        # A cap under which whole batches answer is not met in a way that shows.
        probe = asked
        if isinstance(states, MinSepImportance) and not often_cut(asked):
            probe = whole_batches(asked)
        if min_sep_refusal(probe) is None:
            fresh = TiltedEstimate(self.question.epsilon, target), None
            tilted, last = self._tilted.get(target, fresh)
            sigma = tilted.noise(min_sep_law(probe), last)
            self._tilted[target] = tilted, sigma
        else:
            losses = states.law(asked).losses
            sigma = estimate_noise(losses, epsilon=self.question.epsilon, target=target)
        if any(proven <= sigma for proven, _, _ in results):
            yield Skipped(candidate, f"{states.name} promises no less noise than what is proven")
            return
        about = mechanism.with_noise(sigma)
        yield self._row(candidate, about, states, automatic, Kind.ESTIMATE)

    def _members(self, mechanism: MatrixMechanism) -> tuple[list[Accountant], set[str], set[str]]:
        """The accountants that cover the pair.

        Then the names of those who need not be asked for, and the names of those who answer.
        """
        if self.accountant is not None:
            found = find_accountants(mechanism, self.accountant)
            names = {member.name for member in found}
            return found, names, names
        table = accountants_for(mechanism)
        offered = {each.name for each in table if each.reason is None}
        automatic: set[str] = set()
        if offered:
            automatic = {member.name for member in find_accountants(mechanism)}
        return [each.accountant for each in table if each.refusal is None], offered, automatic

    def _row(
        self,
        candidate: Candidate,
        mechanism: MatrixMechanism,
        member: Accountant,
        automatic: set[str],
        kind: Kind,
    ) -> PlanRow:
        q, scheme = self.question, mechanism.scheme
        buffers, seconds = _cost(mechanism.strategy, q.steps, q.parameters, self.timed)
        fits = q.memory is None or buffers <= q.memory
        return PlanRow(
            candidate=candidate,
            mechanism=mechanism,
            accountant=member,
            automatic=self.accountant is None and member.name in automatic,
            kind=kind,
            rmse=mechanism.strategy.rmse(q.steps, q.workload),
            bytes=buffers,
            seconds=seconds,
            eligible=fits and (not q.fixed_size or scheme.physical_batch_size is not None),
        )


@functools.lru_cache(maxsize=64)
def _cost(strategy: Strategy, steps: int, parameters: int, timed: bool) -> tuple[int, float | None]:
    buffers, seconds, _ = noise_cost(strategy, steps, parameters, timed)
    return buffers, seconds
