"""Losses that mix rows are refused before anything is released; those of dptrain.losses are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from dptrain import Gradients, Poisson
from dptrain.clipping.probe import signature
from dptrain.losses import causal_cross_entropy, reduce_examples, token_cross_entropy
from tests.helpers.engine import MODES, everything_every_step, wire

ROWS, TOKENS, CLASSES = 4, 6, 9


def gpt2():
    torch.manual_seed(0)
    sizes = GPT2Config(
        vocab_size=CLASSES, n_positions=8, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(sizes)


def bert():
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=CLASSES, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(sizes)


def sentences(padded):
    """Ids, masks and labels; with padding, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, CLASSES, (ROWS, TOKENS), generator=generator)
    lengths = torch.tensor([6, 2, 4, 3]) if padded else torch.full((ROWS,), TOKENS)
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return ids * mask, mask, torch.where(mask.bool(), ids, -100)


def inputs(ids, mask):
    """With a row of positions for each example, as the older modes need it."""
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.arange(TOKENS).expand(len(ids), -1),
    }


def run_of(module, tensors, mode="bookkeeping", **options):
    options.setdefault("scheme", everything_every_step(ROWS, 1))
    return wire(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data=TensorDataset(*tensors),
        max_grad_norm=0.05,
        noise_multiplier=0.0,
        seed=1,
        gradients=Gradients(mode=mode),
        **options,
    )


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("model", [gpt2, bert])
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_a_model_that_is_given_labels_is_refused(mode, model, padded):
    """It divides by the tokens of the batch: of 6, 2, 4, 3 one's norm is 1.6 times what it is of
    6, 6, 6, 6. Batches without padding are no excuse: the next one may have some."""
    module = model()
    private = run_of(module, sentences(padded), mode)
    ids, mask, labels = next(iter(private.loader))
    with pytest.raises(RuntimeError, match=r"returns a loss, .*dptrain\.losses"):
        private.module(**inputs(ids, mask), labels=labels)
    assert private.steps_executed == 0
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("model", "mode"), [*((gpt2, mode) for mode in MODES), (bert, "bookkeeping")]
)
def test_the_same_model_with_a_loss_by_the_example_is_right(model, mode):
    loss = causal_cross_entropy if model is gpt2 else token_cross_entropy
    module, tensors = model(), sentences(True)
    alone, norms = copy.deepcopy(module).train(), []
    for ids, mask, labels in zip(*(x.split(1) for x in tensors), strict=True):
        alone.zero_grad()
        loss(alone(**inputs(ids, mask)).logits, labels).backward()
        norms.append(torch.cat([p.grad.flatten() for p in alone.parameters()]).norm())
    private = run_of(module, tensors, mode)
    for ids, mask, labels in private.loader:
        output = private.module(**inputs(ids, mask))
        loss(output.logits, labels).backward()
        private.optimizer.step()
    torch.testing.assert_close(private.last_norms, torch.stack(norms), rtol=1e-4, atol=1e-6)


class WithLoss(nn.Module):
    """Has the loss inside, made of its own arguments."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.loss = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES), loss

    def forward(self, ids, mask, labels):
        return self.loss(self.head(self.embed(ids).tanh()), mask, labels)


class ReturnsLoss(WithLoss):
    """As nanoGPT has it: the logits, and the mean over all tokens if there are targets."""

    def forward(self, ids, targets=None):
        logits = self.head(self.embed(ids).tanh())
        if targets is None:
            return logits, None
        flat = logits.view(-1, CLASSES), targets.view(-1)
        return logits, self.loss(*flat, ignore_index=-1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.followed
def test_a_model_that_returns_the_mean_loss_of_all_tokens_is_right(mode):
    """Where all count, that is the mean of the examples' own means."""
    torch.manual_seed(5)
    ids, targets = torch.randint(CLASSES, (2, ROWS, 7)).unbind()
    module = ReturnsLoss(F.cross_entropy)
    alone, norms = copy.deepcopy(module), []
    for x, y in zip(ids.split(1), targets.split(1), strict=True):
        alone.zero_grad()
        alone(x, y)[1].backward()
        norms.append(torch.cat([p.grad.flatten() for p in alone.parameters()]).norm())
    private = run_of(module, (ids, targets), mode)
    for x, y in private.loader:
        private.module(x, y)[1].backward()
        private.optimizer.step()
    torch.testing.assert_close(private.last_norms, torch.stack(norms), rtol=1e-4, atol=1e-6)
    assert any("shown operator by operator" in note for note in private.guarantee(1e-3).notes)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_returns_a_loss_over_the_tokens_that_count_is_refused_for_it(mode):
    torch.manual_seed(5)
    ids, targets = torch.randint(CLASSES, (2, ROWS, 7)).unbind()
    targets[1, 3:] = -1
    private = run_of(ReturnsLoss(F.cross_entropy), (ids, targets), mode)
    x, y = next(iter(private.loader))
    with pytest.raises(RuntimeError, match=r"returns a loss, .*without labels.*reduce_examples"):
        private.module(x, y)[1].backward()


INSIDE = {
    "by tokens": lambda z, m, y: F.cross_entropy(z.transpose(1, 2), y),
    "by the mask": lambda z, m, y: (z.square().mean(-1) * m).sum() / m.sum(),
    "by class weights": lambda z, m, y: F.cross_entropy(
        z.transpose(1, 2), y, weight=torch.linspace(0.1, 3, CLASSES)
    ),
    "by the longest": lambda z, m, y: (z.square().mean(-1) * m).sum() / m.sum(1).max(),
    "contrastive": lambda z, m, y: F.cross_entropy(
        z.mean(1) @ z.mean(1).T, torch.arange(len(z))
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_inside_that_mixes_rows_is_refused(name, mode):
    ids, mask, labels = sentences(True)
    private = run_of(WithLoss(INSIDE[name]), (ids, mask, labels), mode)
    with pytest.raises(RuntimeError, match="changed when another example"):
        private.module(*next(iter(private.loader)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_inside_by_the_example_is_taken(mode, reduction):
    def loss(z, m, y):
        tokens = token_cross_entropy(z, y, reduction=reduction)
        return tokens + reduce_examples(z.square(), m, reduction=reduction)

    private = run_of(WithLoss(loss), sentences(True), mode, loss_reduction=reduction)
    for batch in private.loader:
        private.module(*batch).backward()
        private.optimizer.step()
    assert private.steps_executed == 1


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


OUTSIDE = {
    "ignored": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "flat": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "masked sum": lambda z, y: (
        F.cross_entropy(z.transpose(1, 2), y, reduction="none").sum() / (y != -100).sum()
    ),
    "weighted": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), y, weight=torch.linspace(0.1, 3, CLASSES)
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_plain_token_loss_outside_is_refused_before_anything_is_released(name, mode):
    ids, _, labels = sentences(True)
    module = Tagger()
    private = run_of(module, (ids, labels), mode)
    x, y = next(iter(private.loader))
    with pytest.raises(
        RuntimeError, match=r"the loss divides by a number that depends on the whole batch"
    ):
        OUTSIDE[name](private.module(x), y).backward()
    assert private.steps_executed == 0


APART = {
    "by the example": token_cross_entropy,
    "causal": causal_cross_entropy,
    "sums": lambda z, y: token_cross_entropy(z, y, within="sum"),
    "a constant": lambda z, y: token_cross_entropy(z, y, within=TOKENS),
    "weighted": lambda z, y: token_cross_entropy(z, y, weight=torch.linspace(0.1, 3, CLASSES)),
    "an example without": lambda z, y: token_cross_entropy(
        z, y.index_fill(0, torch.tensor(1), -100)
    ),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("mode", MODES)
def test_losses_by_the_example_are_taken(name, mode):
    ids, _, labels = sentences(True)
    private = run_of(Tagger(), (ids, labels), mode)
    for x, y in private.loader:
        APART[name](private.module(x), y).backward()
        private.optimizer.step()
    assert private.steps_executed == 1


SIXTEEN_BITS = {
    "bfloat16 within autocast": (torch.bfloat16, True),
    "float16 within autocast": (torch.float16, True),
    "bfloat16 parameters": (torch.bfloat16, False),
}


def batches_taken(loss, tensors, kind, steps=16):
    """How many steps a loss of logits in half precision is let go on for."""
    dtype, autocast = SIXTEEN_BITS[kind]
    module = Tagger() if autocast else Tagger().to(dtype)
    private = run_of(module, tensors, scheme=everything_every_step(len(tensors[0]), steps))
    for x, y in private.loader:
        with torch.autocast("cpu", dtype, enabled=autocast):
            z = private.module(x)
        assert z.dtype == dtype
        try:
            loss(z.float(), y).backward()
        except RuntimeError as error:
            assert "divides by a number that depends on the whole batch" in str(error)  # noqa: PT017
            break
        private.optimizer.step()
    return private.steps_executed


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", SIXTEEN_BITS)
@pytest.mark.usefixtures("_unfollowed")
def test_a_plain_token_loss_is_refused_in_half_precision(kind, name):
    """After six batches, as a sum of rounded shares may be 1 by chance."""
    ids, _, labels = sentences(True)
    assert batches_taken(OUTSIDE[name], (ids, labels), kind) == 5


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("kind", SIXTEEN_BITS)
def test_losses_by_the_example_are_taken_in_half_precision(kind, name):
    ids, _, labels = sentences(True)
    assert batches_taken(APART[name], (ids, labels), kind) == 16


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SIXTEEN_BITS)
@pytest.mark.usefixtures("_unfollowed")
def test_balanced_class_weights_are_taken_in_half_precision(kind, seed):
    """Example by example they average to nearly 1 in every batch, and to 1 by chance: .02 off
    here, which is further than what rounding could make of the sum of 400."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, CLASSES, (400,), generator=generator)
    y = torch.randint(1, CLASSES, (400,), generator=generator)
    weight = torch.linspace(0.7, 1.3, CLASSES)
    weight /= weight[y].mean() / 1.02

    def each(z, y):
        return (weight[y] * F.cross_entropy(z, y, reduction="none")).mean()

    assert batches_taken(each, (ids, y), kind) == 16
    assert batches_taken(lambda z, y: F.cross_entropy(z, y, weight=weight), (ids, y), kind) == 5


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.usefixtures("_unfollowed")
def test_class_weights_of_the_batch_are_refused_after_three_batches(own):
    """Weights that average to 1 in one batch are no sign yet."""
    ids, y = sentences(False)[0][:, 0], torch.tensor([1, 2, 1, 2])
    weight = torch.full((CLASSES,), 1.0)
    weight[1], weight[2] = 0.5, 2.5

    private = run_of(Tagger(), (ids, y), scheme=everything_every_step(ROWS, 4))
    done = 0
    try:
        for x, labels in private.loader:
            z = private.module(x)
            loss = (
                token_cross_entropy(z, labels, weight=weight)
                if own
                else F.cross_entropy(z, labels, weight=weight)
            )
            loss.backward()
            private.optimizer.step()
            done += 1
    except RuntimeError as error:
        assert "divides by a number that depends on the whole batch" in str(error)  # noqa: PT017
    assert done == (4 if own else 2)


@pytest.mark.parametrize("padded", [True, False])
def test_a_plain_mean_is_taken_where_all_have_the_same_length(padded):
    ids, _, labels = sentences(padded)
    private = run_of(Tagger(), (ids, labels), probe="off" if padded else "shapes")
    for x, y in private.loader:
        OUTSIDE["ignored"](private.module(x), y).backward()
        private.optimizer.step()
    assert private.steps_executed == 1
    assert any("probe='off'" in note for note in private.state_dict()["notes"]) == padded


@pytest.mark.parametrize("at_once", [2**19, 50, 7])
@pytest.mark.parametrize("count", [3, 5, 40])
@pytest.mark.parametrize(("shape", "classes"), [((6,), 1), ((6, 7), 2), ((4, 3, 2), 1)])
def test_shares_of_a_cross_entropy_are_found(shape, classes, count, at_once, monkeypatch):
    """Part by part; other losses, and what is no loss, tell nothing."""
    monkeypatch.setattr(signature, "_AT_ONCE", at_once)
    shape = (*shape[:classes], count, *shape[classes:])
    generator = torch.Generator().manual_seed(0)
    y = (3 * torch.randn(shape, generator=generator)).requires_grad_()
    lines = y.movedim(classes, 1)
    likely = lines.detach().argmax(1)  # targets that are the likeliest, and others
    targets = torch.randint(0, count, likely.shape, generator=generator)
    targets[1::2], targets[0] = likely[1::2], -100
    shares = torch.arange(1.0, shape[0] + 1) / 7  # of each row

    def found(**options):
        losses = F.cross_entropy(lines, targets, reduction="none", **options)
        by_row = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
        (gradient,) = torch.autograd.grad(by_row.mul(shares).sum(), y, retain_graph=True)
        return signature._shares(signature.Outlines.of(y.detach(), classes), gradient, classes)

    counted = (targets != -100).reshape(shape[0], -1).sum(1)
    torch.testing.assert_close(found(), shares * counted, rtol=1e-5, atol=1e-6)
    assert found(label_smoothing=0.1) is None
    kept = signature.Outlines.of(y.detach(), classes)
    for other in (y.detach(), torch.randn(shape, generator=generator), torch.ones(shape)):
        assert signature._shares(kept, other, classes) is None


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("made", ["mean", "sum"])
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_batches_of_different_sizes_show_how_a_loss_reduces(declared, made, factor, mode, half):
    """A sum declared as a mean scales every gradient by the number of rows, which one example
    changes, and a mean declared as a sum by its inverse: refused at the third size, whatever
    constant the loss has."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(60, 3, generator=generator)
    labels = torch.randint(0, 4, (60,), generator=generator)
    scheme = Poisson(probability=0.5, dataset_size=60, steps=12)
    torch.manual_seed(0)
    private = run_of(
        nn.Linear(3, 4), (points, labels), mode, scheme=scheme, loss_reduction=declared
    )
    sizes = []

    def whole_run():
        for x, y in private.loader:
            private.optimizer.zero_grad()
            sizes.append(len(x))
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                z = private.module(x)
            (factor * F.cross_entropy(z.float(), y, reduction=made)).backward()
            private.optimizer.step()

    if declared == made:
        whole_run()
        assert len(sizes) == 12
        return
    with pytest.raises(RuntimeError, match=rf"loss='{declared}'.*is a {made} over the rows"):
        whole_run()
    told = set(sizes)
    assert len(told) >= 3
    assert len(set(sizes[:-1])) < 3 or max(sizes[:-1]) < 1.05 * min(sizes[:-1])
    assert private.steps_executed == len(sizes) - 1
