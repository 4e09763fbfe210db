"""The sides of the step-time bench: ordinary training, Opacus and dptrain, a mode each.

Every side has its own copy of the model and one batch, and a step is the user's: clear gradients,
forward, loss, backward, optimizer. The next batch is asked for between steps, outside what is
timed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain import BandMF, Gradients, Poisson, PrivacyEngine
from dptrain.noise import noise_stream
from scripts.bench.step_models import (
    CASES,
    Case,
    Inputs,
    Rows,
    call,
    tensors,
    with_position_ids,
)

ORDINARY = "ordinary"
MAX_STEPS = 100_000
BANDS = 16
SETTLED = 17  # steps after which no run looks at what its loss divides by any more
SIDES: dict[str, tuple[str, str]] = {
    ORDINARY: ("plain", ""),
    "opacus-hooks": ("opacus", "hooks"),
    "opacus-functorch": ("opacus", "functorch"),
    "opacus-ghost": ("opacus", "ghost"),
    "opake": ("opake", ""),
    "hooks": ("dptrain", "hooks"),
    "functorch": ("dptrain", "functorch"),
    "bookkeeping": ("dptrain", "bookkeeping"),
    "bookkeeping-banded": ("dptrain", "bookkeeping"),
}
"""What trains, and in which mode of gradients; "banded" has noise of 16 bands."""

DEFAULT_SIDES = [side for side in SIDES if side not in ("functorch", "bookkeeping-banded")]


class Side:
    """One way to train one model; ``step`` is what is timed, once there was ``wrap``.

    Args:
        name: a key of ``SIDES``.
        case: the model and its batch.
        device: as torch names it.
    """

    def __init__(self, name: str, case: Case, device: str) -> None:
        self.name = name
        self.case = case
        self.device = device
        kind, mode = SIDES[name]
        inputs, labels = case.data()
        if kind == "opacus" or mode in ("hooks", "functorch"):
            inputs = with_position_ids(inputs)
        self.inputs = {key: value.to(device) for key, value in inputs.items()}
        self.labels = labels.to(device)
        self.module: nn.Module = case.module().to(device)
        self.optimizer: Any = _sgd(self.module)
        self.loss: Any = case.loss()
        self.batches: Any = None

    def wrap(self) -> None:
        """Make it private, if it is to be.

        Raises:
            Exception: whatever the library at hand raises where it does not support the model.
        """
        kind, mode = SIDES[self.name]
        if kind == "opacus":
            self._opacus(self.module, self.optimizer, mode)
        elif kind == "opake":
            self._opake(self.module, self.optimizer)
        elif kind == "dptrain":
            banded = self.name.endswith("-banded")
            self._dptrain(self.module, self.optimizer, mode, banded=banded)

    def _opacus(self, module: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> None:
        import opacus
        from opacus.validators import ModuleValidator

        if ModuleValidator.validate(module):  # an LSTM, which Opacus has its own of
            module = ModuleValidator.fix(module).to(self.device)
            optimizer = _sgd(module)
        data = tensors(self.inputs, self.labels)
        made = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=module,
            optimizer=optimizer,
            criterion=self.loss,
            data_loader=DataLoader(data, batch_size=len(data)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        self.module, self.optimizer = made[0], made[1]
        if mode == "ghost":
            self.loss = made[2]

    def _opake(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Gradients by vmap, of the batch at once, its fastest way; the update is torch's."""
        from opake.dpsgd.clipping import clipped_grad
        from opake.dpsgd.noise import gaussian_noise
        from opake.exceptions import ConfigurationError
        from opake.patches import apply_model_patches
        from opake.random import key

        with contextlib.suppress(ConfigurationError):  # for a family without patches
            apply_model_patches(module)
        named = dict(module.named_parameters())
        parameters = {name: p.detach() for name, p in named.items()}
        rows, names = len(self.labels), list(self.inputs)

        def loss(values: dict[str, torch.Tensor], labels: torch.Tensor, *inputs: Any) -> Any:
            batch = {name: x[None] for name, x in zip(names, inputs, strict=True)}
            output = torch.func.functional_call(_Called(module), _prefixed(values), (batch,))
            return self.loss(output, labels[None])

        gradients, clipping = clipped_grad(
            loss,
            clipping_norm=1.0,
            batch_argnums=tuple(range(1, 2 + len(names))),
            normalize_by=rows,
        )
        noise, state = gaussian_noise(noise_multiplier=1.0, key=key(0))

        def step() -> None:
            nonlocal clipping, state
            clipped, clipping = gradients(
                parameters, self.labels, *self.inputs.values(), state=clipping
            )
            noisy, state = noise(clipped, state)
            for name, p in named.items():
                p.grad = noisy.pytree[name]
            optimizer.step()

        self.step = step  # type: ignore[method-assign]

    def _dptrain(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, mode: str, *, banded: bool
    ) -> None:
        rows = len(self.labels)
        batch = (self.inputs, self.labels)
        private = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data=DataLoader(Rows(rows), collate_fn=lambda _: batch),
            scheme=Poisson(probability=1.0, dataset_size=rows, steps=MAX_STEPS),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            gradients=Gradients(loss=self.loss, mode=mode),
        )
        private.end_early()
        self.module, self.optimizer, loader = private
        if banded:  # only what the noise costs matters here, not what it would guarantee
            self.optimizer.noise = noise_stream(
                BandMF(bands=BANDS), steps=1024, like=self.optimizer.params, seed=0
            )
        self.batches = iter(loader)

    def settle(self) -> None:
        """One step, which shows that it works; in bookkeeping ``SETTLED``."""
        for _ in range(SETTLED if SIDES[self.name][1] == "bookkeeping" else 1):
            self.prepare()
            self.step()

    def prepare(self) -> None:
        """The work between two steps: dptrain's next batch, which is the same again."""
        if self.batches is not None:
            next(self.batches)

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.loss(call(self.module, self.inputs), self.labels).backward()
        self.optimizer.step()


class _Called(nn.Module):
    """A module called as a side calls it, so that its arguments are one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Inputs) -> torch.Tensor:
        return call(self.module, inputs)


def _prefixed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": value for name, value in values.items()}


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def open_side(name: str, model: str, device: str) -> Side:
    """The side, after one step that shows that it works, and in bookkeeping ``SETTLED``.

    Raises:
        ValueError: if there is no such side or model.
        Exception: whatever the library at hand raises where it does not support the model.
    """
    if name not in SIDES:
        raise ValueError(f"side {name!r}: choose from {', '.join(SIDES)}")
    if model not in CASES:
        raise ValueError(f"model {model!r}: choose from {', '.join(CASES)}")
    side = Side(name, CASES[model], device)
    side.wrap()
    side.settle()
    return side


def quiet() -> None:
    """No warnings of the libraries between the lines of a table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def reason(error: BaseException) -> str:
    """The reason why a side does not run, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
