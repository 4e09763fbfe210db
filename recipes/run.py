"""From settings and a task to a private run in a folder: prepare, train, report, resume."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dptrain import MatrixMechanism, PrivacyEngine, PrivateTraining
from dptrain.sampling import Scheme, UserScheme
from recipes.config import differences, load_config, to_yaml
from recipes.loop import train
from recipes.report import summary, write_graph, write_report
from recipes.runfolder import SUMMARY, RunFolder, load_checkpoint
from recipes.schedule import Schedule
from recipes.scheme import build_scheme
from recipes.settings import FREE_ON_RESUME, NOISE_DTYPES, RunSettings
from recipes.simulation import Simulation
from recipes.task import Task

FORMAT = 2
INTERRUPTED = 130  # what a shell reports after Ctrl-C

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

    def save(self) -> None:
        """Write the checkpoint."""
        self.folder.save_checkpoint(
            {
                "format": FORMAT,
                "settings": dataclasses.asdict(self.settings),
                "simulation": self.simulation,
                "run": self.private.state_dict(),
            }
        )


def prepare(settings: S, build_task: Callable[[S], Task], *, resume: bool = False) -> Run:
    """Data, model, engine and folder of a new run, or of one that goes on from its checkpoint.

    Raises:
        ValueError: for settings that cannot work, a folder that already holds a run, or a resumed
            run whose settings or data differ from the checkpoint's.
    """
    settings.validate()
    checkpoint = load_checkpoint(settings.output) if resume else None
    if not resume:
        RunFolder.refuse(settings.output, overwrite=settings.overwrite)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.seed is not None:
        # Dropout and the like draw from the global generator: a seeded run repeats them too.
        torch.manual_seed(settings.seed % 2**63)
    task = build_task(settings)
    settings = settings.with_steps(len(task.train))
    scheme = _scheme(settings, task)
    settings = settings.with_delta(scheme.population)
    settings.build_strategy().bind(scheme.steps)  # before anything is overwritten
    mechanism: dict[str, Any]
    simulation: Simulation | None = None
    if checkpoint is not None:
        _check_resumable(checkpoint, settings)
        mechanism = {"mechanism": _saved_mechanism(checkpoint, task)}
    else:
        RunFolder.claim(settings.output, overwrite=settings.overwrite)
        if settings.simulate is not None:
            small = _scheme(settings, task, divisor=settings.simulate)
            simulation = Simulation.of(settings, full=scheme, small=small)
            mechanism = {"mechanism": simulation.mechanism}
        else:
            mechanism = {
                "scheme": scheme,
                "strategy": settings.build_strategy(),
                "target_epsilon": settings.privacy.epsilon,
                "noise_multiplier": settings.privacy.noise_multiplier,
            }
    task.model.to(settings.device)
    private, scheduler = _wire(settings, task, steps=scheme.steps, mechanism=mechanism)
    if checkpoint is not None:
        private.load_state_dict(checkpoint["run"])
    folder = RunFolder(
        settings.output,
        completed_steps=private.steps_executed,
        config=None if resume else to_yaml(settings),
    )
    if task.bounded is not None and not resume:
        write_graph(task.bounded, scheme, folder.path)
    if simulation is not None:
        simulation.mark(folder.path)
    facts = simulation.full if simulation else checkpoint and checkpoint["simulation"]
    return Run(settings, task, scheduler, private, folder, facts)


def _scheme(settings: RunSettings, task: Task, *, divisor: float = 1.0) -> Scheme:
    assert settings.steps is not None
    return build_scheme(
        settings.scheme,
        dataset_size=len(task.train),
        steps=settings.steps,
        graph=task.graph,
        divisor=divisor,
    )


def _saved_mechanism(checkpoint: dict[str, Any], task: Task) -> MatrixMechanism:
    """The checkpoint's mechanism; its scheme gets the edges of its graph back."""
    mechanism = MatrixMechanism.from_dict(checkpoint["run"]["mechanism"])
    scheme = mechanism.scheme
    if isinstance(scheme, UserScheme) and task.graph is not None:
        return dataclasses.replace(mechanism, scheme=scheme.attach(task.graph))
    return mechanism


def _wire(
    settings: RunSettings, task: Task, *, steps: int, mechanism: dict[str, Any]
) -> tuple[PrivateTraining, LambdaLR]:
    ghost = settings.grad_sample_mode == "ghost"
    if ghost and task.criterion is None:
        raise ValueError(
            "grad_sample_mode='ghost': this recipe's loss is no torch criterion, which ghost mode "
            "needs; use hooks or functorch"
        )
    optimizer = settings.optimizer.build([p for p in task.model.parameters() if p.requires_grad])
    scheduler = LambdaLR(optimizer, Schedule(settings.optimizer.schedule, steps))
    private = PrivacyEngine().make_private(
        module=task.model,
        optimizer=optimizer,
        criterion=task.criterion if ghost else None,
        dataset=task.train,
        target_delta=settings.privacy.delta,
        max_grad_norm=settings.privacy.max_grad_norm,
        grad_sample_mode=settings.grad_sample_mode,
        max_physical_batch_size=settings.max_physical_batch_size,
        collate_fn=task.collate_fn,
        num_workers=settings.num_workers,
        pin_memory=settings.device != "cpu",
        lr_scheduler=scheduler,
        seed=settings.seed,
        accountant=settings.build_accountant(),
        secure=settings.privacy.secure,
        noise_dtype=NOISE_DTYPES[settings.privacy.noise_dtype],
        regenerate_noise=settings.privacy.regenerate_noise,
        ledger=RunFolder.ledger_path(settings.output),
        views=task.views,
        **mechanism,
    )
    return private, scheduler


def finish(current: Run) -> None:
    """Train the steps that are left, evaluate, and write the run folder.

    After an interruption ``private.steps_executed`` is below the plan, and only the checkpoint and
    the metrics are there.
    """
    try:
        if current.private.steps_executed == 0:
            current.save()  # the calibrated mechanism is worth keeping from the start
        complete = train(
            current.private,
            task=current.task,
            settings=current.settings,
            scheduler=current.scheduler,
            folder=current.folder,
            save=current.save,
        )
        if complete:
            write_report(current)
    finally:
        current.folder.close()


def _check_resumable(checkpoint: dict[str, Any], settings: RunSettings) -> None:
    if checkpoint.get("format") != FORMAT:
        raise ValueError(f"checkpoint format {checkpoint.get('format')!r} is not {FORMAT}")
    changed = differences(checkpoint["settings"], dataclasses.asdict(settings))
    lines = [
        f"{name}: the run has {old!r}, now {new!r}"
        for name, (old, new) in changed.items()
        if name not in FREE_ON_RESUME
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


def run_recipe(
    name: str,
    description: str,
    schema: type[S],
    build_task: Callable[[S], Task],
    argv: Sequence[str] | None = None,
) -> int:
    """The command line of a recipe; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{name}", description=description)
    parser.add_argument("--config", required=True, help="YAML file, e.g. configs/*.yaml")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--output", help="run folder (the field output)")
    parser.add_argument(
        "--simulate",
        type=float,
        metavar="FACTOR",
        help="divide batch size and noise by FACTOR: cheap, for tuning, and NOT private",
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="e.g. steps=100")
    arguments = parser.parse_intermixed_args(argv)
    try:
        settings = load_config(schema, arguments.config, list(arguments.overrides))
        if arguments.output is not None:
            settings.output = arguments.output
        if arguments.simulate is not None:
            settings.simulate = arguments.simulate
        current = prepare(settings, build_task, resume=arguments.resume)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finish(current)
    if current.private.steps_executed < current.private.mechanism.steps:
        print(
            f"stopped after {current.private.steps_executed} of {current.private.mechanism.steps} "
            "steps; continue with the same command and --resume",
            file=sys.stderr,
        )
        return INTERRUPTED
    text = summary(current)
    (current.folder.path / SUMMARY).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0
