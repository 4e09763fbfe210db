"""From settings and a task to a private run in a folder: prepare, train, report, resume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dptrain import (
    Gradients,
    Loading,
    MatrixMechanism,
    PrivacyEngine,
    PrivateTraining,
)
from dptrain.accounting import Accountant
from dptrain.accounting.base import check_delta
from dptrain.configuration import build_scheme
from dptrain.integrations.loggers import RunLoggers
from dptrain.sampling import AttributionGraph, Scheme, UserScheme
from recipes.average import Average
from recipes.config import differences, to_yaml
from recipes.individual_history import IndividualHistory
from recipes.loop import train
from recipes.report import write_graph, write_report
from recipes.runfolder import RunFolder, load_checkpoint
from recipes.schedule import Schedule
from recipes.settings import RunSettings
from recipes.simulation import Simulation
from recipes.task import Task

FORMAT = 3

S = TypeVar("S", bound=RunSettings)


@dataclasses.dataclass
class Run:
    """Everything of one run, wired and at its current step."""

    settings: RunSettings
    task: Task
    scheduler: LambdaLR
    private: PrivateTraining
    folder: RunFolder
    simulation: dict[str, Any] | None
    history: IndividualHistory | None = None
    average: Average | None = None

    @property
    def outcome(self) -> Task:
        """The task with the model that is evaluated and kept: the average, if there is one."""
        if self.average is None:
            return self.task
        return dataclasses.replace(self.task, model=self.average.model)

    def save(self) -> None:
        """Write the checkpoint."""
        self.folder.save_checkpoint(
            {
                "format": FORMAT,
                "settings": dataclasses.asdict(self.settings),
                "simulation": self.simulation,
                "run": self.private.state_dict(),
                "average": None if self.average is None else self.average.state_dict(),
                "private": {
                    "history": None if self.history is None else self.history.state_dict(),
                },
            }
        )


def prepare(
    settings: S,
    build_task: Callable[[S], Task],
    *,
    resume: bool = False,
    accept_lost_ledger: bool = False,
) -> Run:
    """Data, model, engine and folder of a new run, or of one that goes on from its checkpoint.

    Args:
        settings: of the recipe.
        build_task: from them to data and model.
        resume: go on from the checkpoint.
        accept_lost_ledger: also without the file of released steps, which the statement then says.

    Raises:
        ValueError: for settings that cannot work, a folder that already holds a run, or a resumed
            run whose settings or data differ from the checkpoint's.
    """
    settings.validate()
    _check_without_size(settings)
    RunFolder.recover(settings.output)
    checkpoint = load_checkpoint(settings.output) if resume else None
    if checkpoint is not None:
        _check_resumable(checkpoint, settings)
    else:
        RunFolder.refuse(settings.output, overwrite=settings.overwrite)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.seed is not None:
        # Dropout and the like draw from the global generator: a seeded run repeats them too.
        torch.manual_seed(settings.seed % 2**63)
    task = dataclasses.replace(build_task(settings), autocast=settings.autocast_dtype)
    settings = settings.with_steps(len(task.train))
    scheme = _scheme(settings, len(task.train), task.graph)
    settings = settings.with_delta(scheme.population)
    plan = _plan(settings, scheme)
    task.model.to(settings.device)
    if checkpoint is not None:
        return _resumed(settings, task, checkpoint, accept_lost_ledger=accept_lost_ledger)
    with RunFolder.claim(settings.output, overwrite=settings.overwrite):
        return _new(settings, task, plan)


def _new(settings: RunSettings, task: Task, plan: MatrixMechanism) -> Run:
    """A run at its first step, calibrated; its checkpoint is written."""
    scheme, simulation = plan.scheme, None
    mechanism: dict[str, Any] = {
        "scheme": scheme,
        "strategy": settings.build_strategy(),
        "target_epsilon": settings.privacy.epsilon,
        "noise_multiplier": settings.noise_multiplier(),
    }
    accountant = settings.build_accountant(plan)
    if settings.simulate is not None:
        small = _simulated(settings, scheme, len(task.train), task.graph)
        simulation = Simulation.of(settings, plan=plan, small=small)
        mechanism = {"mechanism": simulation.mechanism}
    average = settings.optimizer.build_average(task.model)
    private, scheduler = _wire(settings, task, mechanism=mechanism, accountant=accountant)
    folder = RunFolder(settings.output, config=to_yaml(settings, without=settings.local_names()))
    if task.bounded is not None:
        write_graph(task.bounded, scheme, folder.path)
    if simulation is not None:
        simulation.mark(folder.path)
    facts = None if simulation is None else simulation.full
    folder.loggers = _loggers(settings, private, covered=simulation is None)
    history = _history(settings, private, task)
    run = Run(settings, task, scheduler, private, folder, facts, history, average)
    run.save()  # the calibrated mechanism is worth keeping from the start
    return run


def _resumed(
    settings: RunSettings, task: Task, checkpoint: dict[str, Any], *, accept_lost_ledger: bool
) -> Run:
    """The run of the checkpoint, at its step."""
    _check_resumable(checkpoint, settings)
    mechanism = _saved_mechanism(checkpoint, task)
    average = settings.optimizer.build_average(task.model)
    private, scheduler = _wire(
        settings,
        task,
        mechanism={"mechanism": mechanism},
        accountant=settings.build_accountant(mechanism),
    )
    private.load_state_dict(checkpoint["run"], accept_lost_ledger=accept_lost_ledger)
    if average is not None:
        average.load_state_dict(checkpoint["average"])
    history = _history(settings, private, task)
    saved = checkpoint.get("private", {}).get("history")
    if history is not None and saved is not None:
        history.load_state_dict(saved)
    folder = RunFolder(settings.output, completed_steps=private.steps_executed)
    folder.loggers = _loggers(settings, private, covered=checkpoint["simulation"] is None)
    simulation = checkpoint["simulation"]
    return Run(settings, task, scheduler, private, folder, simulation, history, average)


def _loggers(settings: RunSettings, private: PrivateTraining, *, covered: bool) -> RunLoggers:
    """Those of the settings, of which they see what is public."""
    return RunLoggers(
        private,
        settings.loggers,
        folder=settings.output,
        facts=settings.public_facts if covered else {**settings.public_facts, "not_private": True},
        private_metrics=settings.log_private_metrics,
        not_covered=not covered,
    )


def _history(
    settings: RunSettings, private: PrivateTraining, task: Task
) -> IndividualHistory | None:
    """Made only for who asks for the report of a filter."""
    individual = settings.build_filter()
    if individual is None or not settings.reports_individual:
        return None
    return IndividualHistory(private, individual, task)


def check_plan(settings: RunSettings, dataset_size: int) -> None:
    """Refuse what is wrong with a run on so many examples, before minutes of reading them.

    Readers that have only listed their files know the number; everything is checked again later.

    Args:
        settings: of a recipe whose data know no users.
        dataset_size: N.

    Raises:
        ValueError: naming the field, the value and the remedy.
    """
    settings = settings.with_steps(dataset_size)
    scheme = _scheme(settings, dataset_size)
    _plan(settings.with_delta(scheme.population), scheme)
    if settings.simulate is not None:
        _simulated(settings, scheme, dataset_size)


_MANY = 1 << 16  # examples a step, of a plan whose number of examples is not known


def _check_without_size(settings: RunSettings) -> None:
    """Refuse a scheme and a strategy that nobody accounts for, where N does not matter.

    It does not where the scheme states N over the batch size, and no batch is cut.
    """
    length = settings.scheme.get("epoch_length")
    cut = settings.scheme.get("max_batch_size") is not None
    if settings.knows_users or length is None or cut:
        return
    size = math.ceil(length) * _MANY
    settings = settings.with_steps(size)
    try:
        scheme = _scheme(settings, size)
    except ValueError:
        return  # perhaps for this size only: whole epochs, say, of a rounded batch size
    _pair(settings.with_delta(size), scheme)


def _plan(settings: RunSettings, scheme: Scheme) -> MatrixMechanism:
    """Scheme and strategy, with any noise: what can be seen to be wrong is refused here.

    Raises:
        ValueError: if the strategy does not fit the steps, δ protects nobody, or nobody accounts
            for the pair.
    """
    if settings.privacy.delta is not None:
        check_delta(settings.privacy.delta, scheme, name="privacy.delta", large="refuse")
    return _pair(settings, scheme)


def _pair(settings: RunSettings, scheme: Scheme) -> MatrixMechanism:
    try:
        plan = MatrixMechanism(
            scheme=scheme, strategy=settings.build_strategy(), noise_multiplier=1.0
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategy: {error}") from error
    settings.build_accountant(plan)
    individual = settings.build_filter()
    if individual is not None:
        individual.check(plan)
    return plan


def _scheme(
    settings: RunSettings,
    dataset_size: int,
    graph: AttributionGraph | None = None,
    *,
    divisor: float = 1.0,
) -> Scheme:
    assert settings.steps is not None
    return build_scheme(
        settings.scheme,
        dataset_size=dataset_size,
        steps=settings.steps,
        graph=graph,
        divisor=divisor,
    )


def _simulated(
    settings: RunSettings,
    scheme: Scheme,
    dataset_size: int,
    graph: AttributionGraph | None = None,
) -> Scheme:
    """The scheme of a simulation, whose batches are smaller than those of ``scheme``."""
    assert settings.simulate is not None
    small = _scheme(settings, dataset_size, graph, divisor=settings.simulate)
    if small.expected_batch_size < 1:
        raise ValueError(
            f"simulate={settings.simulate:g}: an expected batch size of "
            f"{scheme.expected_batch_size:g} leaves nothing to divide; use at most "
            f"{int(scheme.expected_batch_size)}"
        )
    return small


def _saved_mechanism(checkpoint: dict[str, Any], task: Task) -> MatrixMechanism:
    """The checkpoint's mechanism; its scheme gets the edges of its graph back."""
    mechanism = MatrixMechanism.from_dict(checkpoint["run"]["mechanism"])
    scheme = mechanism.scheme
    if isinstance(scheme, UserScheme) and task.graph is not None:
        return dataclasses.replace(mechanism, scheme=scheme.attach(task.graph))
    return mechanism


def _wire(
    settings: RunSettings,
    task: Task,
    *,
    mechanism: dict[str, Any],
    accountant: str | Accountant | None,
) -> tuple[PrivateTraining, LambdaLR]:
    """Engine and learning-rate schedule; ``mechanism`` is what make_private is told of it."""
    optimizer = settings.optimizer.build([p for p in task.model.parameters() if p.requires_grad])
    assert settings.steps is not None
    scheduler = LambdaLR(optimizer, Schedule(settings.optimizer.schedule, settings.steps))
    private = PrivacyEngine(
        accountant=accountant, ledger=RunFolder.ledger_path(settings.output)
    ).make_private(
        module=task.model,
        optimizer=optimizer,
        data=DataLoader(
            task.train,
            collate_fn=task.collate_fn,
            num_workers=settings.num_workers,
            pin_memory=settings.device != "cpu",
        ),
        target_delta=settings.privacy.delta,
        max_grad_norm=settings.privacy.max_grad_norm,
        seed=settings.seed,
        individual=settings.build_filter(),
        gradients=Gradients(
            clipping=settings.build_clipping(), mode=settings.grad_sample_mode, views=task.views
        ),
        noise=settings.build_noise(),
        loading=Loading(max_physical_batch_size=settings.max_physical_batch_size),
        **mechanism,
    )
    private.register_scheduler(scheduler)
    return private, scheduler


def finish(current: Run) -> None:
    """Train the steps that are left, evaluate, and write the run folder.

    After an interruption ``private.steps_executed`` is below the plan, and only the checkpoint and
    the metrics are there.
    """
    try:
        complete = train(
            current.private,
            task=current.task,
            outcome=current.outcome,
            average=current.average,
            settings=current.settings,
            scheduler=current.scheduler,
            folder=current.folder,
            save=current.save,
            history=current.history,
            covered=current.simulation is None,
        )
        if complete:
            write_report(current)
    finally:
        current.folder.close()
        current.private.end_early()  # the command says how far it came, and how to go on


def _check_resumable(checkpoint: dict[str, Any], settings: RunSettings) -> None:
    """Refuse other settings than the run's; those that the data fill in are compared afterwards.

    Raises:
        ValueError: naming each with both values.
    """
    unread = {"steps", "epochs"} if settings.epochs is not None else set()
    if settings.privacy.delta is None:
        unread.add("privacy.delta")
    if checkpoint.get("format") != FORMAT:
        raise ValueError(f"checkpoint format {checkpoint.get('format')!r} is not {FORMAT}")
    changed = differences(checkpoint["settings"], dataclasses.asdict(settings))
    lines = [
        f"{name}: the run has {old!r}, now {new!r}"
        for name, (old, new) in changed.items()
        if name not in settings.free_on_resume and name not in unread
    ]
    if lines:
        raise ValueError(
            "a resumed run must keep its settings; put these back or start a new run: "
            + "; ".join(lines)
        )


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A model with the weights that this public seed gives; the global generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
