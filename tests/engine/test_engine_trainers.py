"""Trainers that drive the loop themselves: what they count is what they get, and closures."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from dptrain import Gradients, Loading, Poisson
from dptrain.engine import unfinished
from tests.helpers.engine import flat, images, make, separated, small_net, train, wire

N, STEPS = 24, 12
SCHEME = Poisson(probability=0.3, dataset_size=N, steps=STEPS)


class Lightning:
    """What the fit loop of Lightning 2 does, by its documentation.

    ``configure_optimizers`` comes first, then the loader is asked for and its length taken once.
    Without a length it takes a batch ahead, to know which is the last. The optimizer is called with
    a closure that computes the loss, clears gradients and runs the backward pass.
    """

    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, model):
        model.trainer = self
        optimizer = model.configure_optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        loader = model.train_dataloader()
        try:
            most = len(loader)
        except (TypeError, NotImplementedError):
            most = math.inf
        model.train()
        self.losses = []
        for _ in range(self.max_epochs):
            for number, batch in enumerate(self._fetched(loader, most)):
                if number >= most:
                    break

                def closure(batch=batch):
                    loss = model.training_step(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    return loss

                self.losses.append(optimizer.step(closure=closure))

    @staticmethod
    def _fetched(loader, most):
        batches = iter(loader)
        if most != math.inf:
            # It stops when it has counted, and never asks whether there are more.
            yield from itertools.islice(batches, most)
            return
        ahead = next(batches)
        for following in batches:
            yield ahead
            ahead = following
        yield ahead


class Classifier(nn.Module):
    """A LightningModule of the user's, made private where Opacus's example does it."""

    def __init__(self, mode, **options):
        super().__init__()
        self.net = small_net()
        self.mode, self.options = mode, options
        self.inner = options.pop("inner", False)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        module = self.net if self.inner else self
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.private = wire(
            module=module,
            optimizer=optimizer,
            data=images(N),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=5,
            gradients=Gradients(mode=self.mode),
            **self.options,
        )
        return self.private.optimizer

    def train_dataloader(self):
        return self.private.loader


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("options", [{}, {"microbatches": 3}])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("inner", [True, False])
def test_a_lightning_loop_runs_the_whole_plan_and_learns_the_same(mode, options, epochs, inner):
    common = {"scheme": SCHEME, "steps_per_epoch": STEPS // epochs, **options}
    model, trainer = Classifier(mode, inner=inner, **common), Lightning(max_epochs=epochs)
    trainer.fit(model)
    assert model.private.steps_executed == STEPS
    assert len(trainer.losses) == STEPS * options.get("microbatches", 1)
    assert all(torch.isfinite(loss) for loss in trainer.losses)
    plain = make(small_net(), images(N), mode, **common)
    for _ in range(epochs):
        train(plain)
    assert torch.equal(flat(model.net), flat(plain.module))


def test_a_loop_that_fetches_ahead_is_told_what_to_set():
    model = Classifier("bookkeeping", scheme=SCHEME, max_physical_batch_size=2)
    with pytest.raises(RuntimeError, match=r"taking the next one.*set microbatches= instead of"):
        Lightning(max_epochs=1).fit(model)
    assert model.private.steps_executed == 0


def test_a_loop_over_the_loader_from_before_is_refused(mode):
    """The trainer took the data before they were private: nothing of them is learned."""
    model = Classifier(mode, scheme=SCHEME)
    model.train_dataloader = lambda: torch.utils.data.DataLoader(images(N), batch_size=4)
    before = flat(model)
    told = r"give a trainer private.loader|take a batch from the private loader"
    with pytest.raises(RuntimeError, match=told):
        Lightning(max_epochs=1).fit(model)
    assert torch.equal(flat(model), before)


def closures(private, count):
    """Loop of closures, as of torch's own examples: the gradients are cleared first."""
    module, optimizer, loader = private
    for x, y in itertools.islice(loader, count):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()
            return loss

        with torch.no_grad():  # torch's step() runs the closure with gradients
            assert optimizer.step(closure).requires_grad


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("micro", [{}, {"max_physical_batch_size": 3}, {"microbatches": 2}])
def test_a_closure_gives_the_step_of_the_usual_loop(mode, micro):
    runs = [
        make(small_net(dropout=0.3), images(), mode, **separated(24, 8), **micro) for _ in range(2)
    ]
    torch.manual_seed(3)
    closures(runs[0], None)
    torch.manual_seed(3)
    train(runs[1])
    assert runs[0].steps_executed == runs[1].steps_executed == 8
    assert torch.equal(flat(runs[0].module), flat(runs[1].module))


def test_a_closure_that_fails_releases_nothing(mode):
    private = make(small_net(), images(), mode, **separated(24, 8))
    again = make(small_net(), images(), mode, **separated(24, 8))

    def fails():
        private.optimizer.zero_grad()
        nn.functional.cross_entropy(private.module(x), y).backward()
        raise OSError("on the way")

    x, y = next(iter(private.loader))
    before = flat(private.module)
    with pytest.raises(OSError, match="on the way"):
        private.optimizer.step(fails)
    assert private.steps_executed == 0
    assert torch.equal(flat(private.module), before)
    train(private)
    train(again)
    assert torch.equal(flat(private.module), flat(again.module))


class Labelled(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, row):
        x, y = images(N)[row]
        return {"x": x, "labels": y}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"microbatches": 3}])
def test_hugging_faces_trainer_runs_the_whole_plan(tmp_path, options):
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return private.loader

        def compute_loss(self, model, inputs, **_):
            return nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"])

    net = small_net()
    private = wire(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        data=Labelled(),
        scheme=SCHEME,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=5,
        loading=Loading(steps_per_epoch=4),
        **options,
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(
        model=private.module,
        args=arguments,
        train_dataset=Labelled(),
        optimizers=(private.optimizer, None),
    )
    assert trainer.train().global_step == STEPS * options.get("microbatches", 1)
    assert private.steps_executed == STEPS
    plain = make(small_net(), images(N), "bookkeeping", scheme=SCHEME, **options)
    train(plain)
    assert torch.equal(flat(net), flat(plain.module))


def test_the_guarantee_of_a_run_that_ended_early_says_so():
    private = make(small_net(), images(), target_delta=1e-3, **separated(24, 8))
    train(private, steps=3)
    assert "all its 8 noisy updates (3 of them have run; the" in str(private.guarantee())
    train(private)
    assert "all its 8 noisy updates (all of them have run)" in str(private.guarantee())


@pytest.fixture
def told(caplog):
    """What is said at exit of the runs that a test makes."""
    unfinished.forget()

    def at_exit():
        caplog.clear()
        unfinished.tell()
        return caplog.text

    return at_exit


def test_a_run_that_was_left_early_is_named_at_exit_and_no_other(told):
    assert not told()
    private = make(small_net(), images(), **separated(24, 8))
    assert not told()  # made and not begun
    train(private, steps=3)
    assert "ended early, after 3 of 8 planned steps" in told()
    train(private, steps=5)
    assert "5 of 8" in told()
    state = private.state_dict()
    again = make(small_net(), images(), **{**separated(24, 8), "seed": None})
    again.load_state_dict(state)
    train(again)
    assert not told()  # the one that was left went on here
    meant = make(small_net(), images(), seed=77, **separated(24, 8))
    meant.end_early()
    train(meant, steps=3)
    assert not told()
    for seed in range(5):
        train(make(small_net(), images(), seed=seed, **separated(24, 9)), steps=2)
    line = told()
    assert line.count("2 of 9 planned steps") == 3
    assert "and 2 more" in line
    assert len(line.splitlines()) == 1


SCRIPT = """
    import sys
    import torch
    from torch.utils.data import TensorDataset
    from dptrain import Poisson, PrivacyEngine
    model = torch.nn.Linear(2, 2)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(9, 2), torch.zeros(9, dtype=torch.int64)),
        scheme=Poisson(probability=0.5, dataset_size=9, steps=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in private.loader:
        private.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
        if private.steps_executed == int(sys.argv[1]):
            break
    del private
"""


@pytest.mark.slow
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("steps", "lines"), [(4, 1), (6, 0)])
def test_a_program_says_it_once(steps, lines):
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(steps)]
    ended = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120)
    found = [line for line in ended.stderr.splitlines() if "planned steps" in line]
    assert len(found) == lines, ended.stderr
    assert all("after 4 of 6 planned steps" in line for line in found)
