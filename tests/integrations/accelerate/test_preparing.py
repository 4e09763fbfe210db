"""A loop of accelerate's with a private run is the plain loop, bit for bit, or an error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from tests.helpers.engine import flat, images, make, separated, small_net, train

accelerate = pytest.importorskip("accelerate")

from dptrain.integrations.accelerate import prepare  # noqa: E402

STEPS = 8


def run(dropout=0.0, **options):
    return make(small_net(dropout), images(), "bookkeeping", **separated(24, STEPS), **options)


def decay(private):
    return torch.optim.lr_scheduler.ExponentialLR(private.optimizer, 0.9)


def loop(accelerator, prepared, scheduler=None, steps=None):
    module, optimizer, loader = prepared
    for taken, (x, y) in enumerate(loader, start=1):
        with accelerator.accumulate(module):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(module(x), y))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        if taken == steps:
            break


@pytest.mark.parametrize("parts", [None, 2])
def test_a_loop_is_the_plain_one(parts):
    private, plain = run(microbatches=parts), run(microbatches=parts)
    scheduler = decay(private)
    accelerator = accelerate.Accelerator(cpu=True)
    module, optimizer, loader = prepare(accelerator, private, scheduler)
    assert module is private.module
    assert loader is private.loader
    loop(accelerator, (module, optimizer, loader), scheduler)
    plain_scheduler = plain.register_scheduler(decay(plain))
    train(plain, after_step=plain_scheduler.step)
    assert private.steps_executed == STEPS
    assert torch.equal(flat(private.module), flat(plain.module))
    assert scheduler.get_last_lr() == pytest.approx([0.1 * 0.9**STEPS])


def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    ends = []
    for saves in (False, True):
        torch.manual_seed(3)
        private = run(dropout=0.3)
        accelerator = accelerate.Accelerator(cpu=True)
        scheduler = decay(private)
        prepared = prepare(accelerator, private, scheduler)
        loop(accelerator, prepared, scheduler, steps=5)
        if saves:
            accelerator.save_state(tmp_path)
            # They hold the seeds of the noise, and random states.
            kept = [path for path in tmp_path.rglob("*") if path.is_file()]
            assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
            torch.manual_seed(99)
            private = run(dropout=0.3, seed=None)
            accelerator = accelerate.Accelerator(cpu=True)
            scheduler = decay(private)
            prepared = prepare(accelerator, private, scheduler)
            accelerator.load_state(tmp_path)
            assert private.steps_executed == 5
        loop(accelerator, prepared, scheduler)
        ends.append(flat(private.module))
    assert torch.equal(*ends)


def test_what_is_gathered_for_metrics_is_all_there_is():
    private = run()
    accelerator = accelerate.Accelerator(cpu=True)
    module, optimizer, loader = prepare(accelerator, private)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(module(x), y))
        optimizer.step()
        assert torch.equal(accelerator.gather_for_metrics(y), y)
    # Evaluation data are accelerate's as ever.
    data = accelerator.prepare(torch.utils.data.DataLoader(images(), batch_size=7))
    gathered = [accelerator.gather_for_metrics(module(x).argmax(1)) for x, _ in data]
    assert len(torch.cat(gathered)) == 24


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_the_batchs_gradient_is_refused(name):
    private = run()
    accelerator = accelerate.Accelerator(cpu=True)
    module, _, loader = prepare(accelerator, private)
    x, y = next(iter(loader))
    accelerator.backward(nn.functional.cross_entropy(module(x), y))
    clip = getattr(accelerator, name)
    for parameters in (module.parameters(), next(module.parameters())):
        with pytest.raises(RuntimeError, match=rf"{name} would clip.*max_grad_norm"):
            clip(parameters, 1.0)
    other = nn.Linear(2, 1)
    accelerator.backward(other(torch.ones(1, 2)).sum())
    clip(other.parameters(), 0.1)
    assert other.weight.grad.abs().max() <= 0.1
    private.detach()
    module(x).sum().backward()
    clip(module.parameters(), 1.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"gradient_accumulation_steps": 2},
            r"gradient_accumulation_steps=2.*Loading\(microbatches=2\)",
        ),
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16'.*torch.autocast"),
    ],
)
def test_settings_that_change_the_steps(options, told):
    accelerate.state.AcceleratorState._reset_state()
    try:
        with pytest.raises(ValueError, match=told):
            prepare(accelerate.Accelerator(cpu=True, **options), run())
    finally:
        accelerate.state.AcceleratorState._reset_state()


def test_what_is_no_run():
    with pytest.raises(TypeError, match="private="):
        prepare(accelerate.Accelerator(cpu=True), small_net())


def test_schedulers_of_another_optimizer():
    private, other = run(), run()
    with pytest.raises(ValueError, match="of another optimizer"):
        prepare(accelerate.Accelerator(cpu=True), private, decay(other))


TWO = """
    import accelerate, torch
    from dptrain.integrations.accelerate import prepare
    from tests.helpers.engine import flat, train
    from tests.integrations.accelerate.test_preparing import STEPS, decay, loop, run

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    private, plain = run(), run()
    scheduler = decay(private)
    loop(accelerator, prepare(accelerator, private, scheduler), scheduler)
    train(plain, after_step=plain.register_scheduler(decay(plain)).step)
    assert private.steps_executed == STEPS
    assert torch.equal(flat(private.module), flat(plain.module))
    assert abs(scheduler.get_last_lr()[0] - 0.1 * 0.9**STEPS) < 1e-9
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_make_one_run():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "true"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(TWO)],
                env={**os.environ, **common, **own},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
