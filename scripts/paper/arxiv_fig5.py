"""arXiv, private for every author, after Dong & Ganesh 2026 (arXiv 2602.09338), Figure 5.

Papers of two or more authors, 50,000 held out, at most two training examples an author with copies,
1,000 steps of expected batches of 1,024, δ = 1/500,000, as in section 7.3 of the paper. The first
32 tokens of an abstract are to give its archive (21 classes). Tokenizer and first weights are from
papers of people who wrote none of the training papers (``recipes.arxiv_warm_start``): those are
taken to be public.

  dp-sgd       Identity + Poisson sampling (UserMinSep of one step), draws hidden
  cyclic       BandMF + UserCyclic: slots of a partition of the public graph
  min-sep      BandMF + UserMinSep, the paper's scheme, by what is proven of it
  unamplified  BandMF + UserFixed, no use made of the draws

BERT-tiny (2 layers, 128 wide) is trained, in two contests of the same four mechanisms:

  head   the two layers above the encoder, which stays as it is: seconds of a core a run.
  whole  every weight but the embeddings': most of an hour of a core a run, so rather a GPU.

Slots, bands and separations are those with the least predicted error (user_errors.py of
scripts/bench), not chosen by accuracy. The learning rate of each (ε, method) is chosen by its
loss on 10,000 of the held-out papers, and the other 40,000 are looked at once by each run that
counts. Nothing about held-out papers is protected; but the choice takes more runs on the training
papers, which no stated guarantee covers. Every finished run is a line of the results, so the grid
goes on where it stopped, on the same first weights; others need ``--results`` of their own:

    GIT_LFS_SKIP_SMUDGE=1 git clone https://github.com/staeiou/arxiv_archive work/archive
    python -m recipes.arxiv_warm_start --path work/archive --output work/warm \\
        --cache-dir work/cache --test-size 50000 --on-error skip
    PYTHONPATH=. python scripts/paper/arxiv_fig5.py head --root work --processes 1
    PYTHONPATH=. python scripts/paper/arxiv_fig5.py whole --root work --device cuda
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dptrain import (
    AttributionGraph,
    BandMF,
    Identity,
    Loading,
    MatrixMechanism,
    PrivacyEngine,
    UserCyclic,
    UserFixed,
    UserMinSep,
)
from dptrain.sampling import Scheme, UserScheme
from recipes.data.arxiv import ArxivData, arxiv
from recipes.models.bert import CATEGORY, bert
from recipes.models.bert_heads import INPUTS
from scripts import results
from scripts.bench.user_errors import BATCH, DELTA, EPSILONS, OUT, STEPS
from scripts.utility.command import run_contest
from scripts.utility.contest import (
    ACCURACY,
    LOSS,
    NOT_RUN,
    SEEDS,
    Contest,
    Job,
    Method,
    by_method,
)

HERE = pathlib.Path(__file__).parent
HELD_OUT, CHOSEN_ON = 50_000, 10_000
LENGTH = 32
FIRST_RATE = 0.03  # of the search for the best
ROWS = 133_853  # training examples, copies counted, of the archive's 128 files that Git brings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The training setting.

    Attributes:
        title: of the plot.
        whole: every weight but the embeddings', or pooler and classifier alone.
        rates: learning rates that may be tried.
        rows: most examples in a processor's memory at once.
    """

    title: str
    whole: bool = True
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    rows: int = 64


TITLES = {
    "dp-sgd": "DP-SGD",
    "cyclic": "`UserCyclic`",
    "min-sep": "`UserMinSep`",
    "unamplified": "`UserFixed`",
}
PARTS = {
    "head": Part(
        title="pooler and classifier", whole=False, rates=(0.03, 0.1, 0.3, 1.0), rows=2048
    ),
    "whole": Part(title="all of BERT-tiny but its embeddings"),
}


# What is trained on.


@functools.cache
def papers(root: pathlib.Path) -> ArxivData:
    """Token rows of training and held-out papers, and who wrote them."""
    return arxiv(
        root / "archive",
        tokenizer=root / "warm" / "tokenizer",
        cache_dir=root / "cache",
        test_size=HELD_OUT,
        max_length=LENGTH,
        on_error="skip",
        offline=True,
    )


def graph(root: pathlib.Path) -> AttributionGraph:
    """The authors of the training examples."""
    return papers(root).graph


@functools.cache
def warm(root: pathlib.Path) -> nn.Module:
    """BERT as the papers outside left it, without dropout: what is trained on are few batches."""
    found = papers(root)
    return bert(
        root / "warm" / CATEGORY,
        head=CATEGORY,
        vocabulary=found.vocabulary.size,
        max_length=LENGTH,
        classes=len(found.classes),
        dropout=0.0,
        offline=True,
    )


class Head(nn.Module):
    """The layers above BERT's encoder: the pooler and the classifier."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.dense = copy.deepcopy(model.bert.pooler.dense)
        self.classifier = copy.deepcopy(model.classifier)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of states (rows, hidden) of the first token."""
        logits: torch.Tensor = self.classifier(torch.tanh(self.dense(states)))
        return logits


class Encoder(nn.Module):
    """BERT of token rows in one tensor (rows, inputs, length); its embeddings stay as they are."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.bert.embeddings.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits."""
        inputs = {name: rows[:, place] for place, name in enumerate(INPUTS)}
        logits: torch.Tensor = self.model(**inputs).logits
        return logits


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs and labels by row; a paper that is used twice has two rows."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[row], self.labels[row]

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.inputs[rows].unbind(), self.labels[rows].unbind(), strict=True))


def tensors(tokens: Any) -> Rows:
    """Token rows as one tensor each."""
    columns = tokens.with_format("numpy", columns=[*INPUTS, "label"])[:]
    inputs = np.stack([np.asarray(columns[name], dtype=np.int64) for name in INPUTS], axis=1)
    return Rows(torch.from_numpy(inputs), torch.from_numpy(np.asarray(columns["label"], np.int64)))


@torch.no_grad()
def states(rows: Rows, model: Any) -> Rows:
    """The encoder's state of the first token, for every row."""
    model.eval()
    found = []
    for start in range(0, len(rows), 512):
        part = rows.inputs[start : start + 512]
        inputs = {name: part[:, place] for place, name in enumerate(INPUTS)}
        found.append(model.bert(**inputs).last_hidden_state[:, 0].clone())
    return Rows(torch.cat(found), rows.labels)


@functools.cache
def data(root: pathlib.Path, part: Part) -> tuple[Rows, Rows, Rows]:
    """Training papers, those that rates are chosen on, and those of the test."""
    found = papers(root)
    if part.whole:
        train, held = (tensors(tokens) for tokens in (found.train, found.test))
    else:
        model = warm(root)
        train, held = (_kept_states(root, each, model) for each in (found.train, found.test))
    chosen = Rows(held.inputs[:CHOSEN_ON], held.labels[:CHOSEN_ON])
    return train, chosen, Rows(held.inputs[CHOSEN_ON:], held.labels[CHOSEN_ON:])


def _kept_states(root: pathlib.Path, tokens: Any, model: nn.Module) -> Rows:
    """States by tokens and weights; they take minutes."""
    sha = hashlib.sha256(tokens.fingerprint.encode())
    for value in model.state_dict().values():
        sha.update(value.numpy().tobytes())
    path = root / "cache" / f"states-{sha.hexdigest()[:32]}.pt"
    if not path.exists():
        made = states(tensors(tokens), model)
        temporary = path.with_suffix(".tmp")
        torch.save((made.inputs, made.labels), temporary)
        temporary.replace(path)
    return Rows(*torch.load(path, weights_only=True))


# How it is trained.


def _dp_sgd(users: AttributionGraph) -> Scheme:
    return UserMinSep.for_batch_size(graph=users, batch_size=BATCH, min_sep=1, steps=STEPS)


def _cyclic(cycle: int, spread: int, users: AttributionGraph) -> Scheme:
    return UserCyclic.for_batch_size(
        graph=users, batch_size=BATCH, cycle=cycle, spread=spread, steps=STEPS
    )


def _min_sep(min_sep: int, users: AttributionGraph) -> Scheme:
    return UserMinSep.for_batch_size(graph=users, batch_size=BATCH, min_sep=min_sep, steps=STEPS)


def _unamplified(min_sep: int, users: AttributionGraph) -> Scheme:
    return UserFixed.for_batch_size(graph=users, batch_size=BATCH, min_sep=min_sep, steps=STEPS)


@functools.cache
def settings(epsilon: float) -> dict[str, dict[str, Any]]:
    """Of each scheme, the row of ``user_errors`` with plain BandMF and the least error at ε."""
    best: dict[str, dict[str, Any]] = {}
    for row in results.read(OUT)["table"]:
        kind, bands = row["scheme"]["type"], row["strategy"]["type"]
        if not bands.startswith("BandMF"):
            continue
        known = best.get(kind)
        if known is None or row["error"][f"{epsilon:g}"] < known["error"][f"{epsilon:g}"]:
            best[kind] = row
    return {
        kind: row["scheme"] | {"bands": int(row["strategy"]["type"][len("BandMF(") : -1])}
        for kind, row in best.items()
    }


@functools.cache
def methods(epsilon: float) -> Mapping[str, Method]:
    """The four mechanisms, with the settings that are best for them at this ε."""
    cyclic, apart = settings(epsilon)["UserCyclic"], settings(epsilon)["UserMinSep"]
    fixed = settings(epsilon)["UserFixed"]
    return {
        "dp-sgd": Method(
            title="DP-SGD", scheme=_dp_sgd, strategy=Identity(), first_rate=FIRST_RATE
        ),
        "cyclic": Method(
            title="BandMF, UserCyclic",
            scheme=functools.partial(_cyclic, cyclic["cycle"], cyclic.get("spread", 1)),
            strategy=BandMF(bands=cyclic["bands"]),
            first_rate=FIRST_RATE,
        ),
        "min-sep": Method(
            title="BandMF, UserMinSep",
            scheme=functools.partial(_min_sep, apart["min_sep"]),
            strategy=BandMF(bands=apart["bands"]),
            first_rate=FIRST_RATE,
        ),
        "unamplified": Method(
            title="BandMF, UserFixed",
            scheme=functools.partial(_unamplified, fixed["min_sep"]),
            strategy=BandMF(bands=fixed["bands"]),
            first_rate=FIRST_RATE,
        ),
    }


def run(
    part: Part,
    contest: Contest,
    root: pathlib.Path,
    job: Job,
    noise: dict[str, Any],
    device: str,
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    """Loss and accuracy after the last step, and what the steps took (CPU, s).

    Raises:
        ValueError: if the folder gives other papers, or other first weights than earlier runs had.
    """
    users = graph(root)
    train, chosen, test = data(root, part)
    if len(train) != contest.dataset_size:
        raise ValueError(
            f"{root} gives {len(train)} training examples, not {contest.dataset_size}: its files "
            "are not the 128 by category of 2020-01-01 that Git brings without large-file storage"
        )
    mechanism = MatrixMechanism.from_dict(noise)
    assert isinstance(mechanism.scheme, UserScheme)
    mechanism = dataclasses.replace(mechanism, scheme=mechanism.scheme.attach(users))
    torch.manual_seed(job.seed)
    model = (Encoder if part.whole else Head)(warm(root)).to(device)
    held = chosen if job.tuning else test
    before = measured(model, held)
    check_same_start(before["loss"], earlier)
    start = time.process_time()
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=job.rate,
            momentum=contest.momentum,
        ),
        data=DataLoader(train),
        mechanism=mechanism,
        target_delta=contest.delta,
        max_grad_norm=contest.max_grad_norm,
        loading=Loading(max_physical_batch_size=contest.rows_of(device)),
        seed=job.seed,
    )
    criterion = nn.CrossEntropyLoss()
    with private:
        for inputs, labels in private.loader:
            private.optimizer.zero_grad()
            criterion(private.module(inputs.to(device)), labels.to(device)).backward()
            private.optimizer.step()
    seconds = time.process_time() - start
    return measured(model, held) | {"seconds": seconds, "before": before}


def check_same_start(loss: float, earlier: dict[str, Any] | None) -> None:
    """Runs of one table have the same first weights.

    ``recipes.arxiv_warm_start`` makes others on other machines: their losses differ in the third
    digit, and those of the same weights on two devices from the sixth.

    Raises:
        ValueError: if they have not.
    """
    if earlier is not None and not math.isclose(loss, earlier["before"]["loss"], rel_tol=1e-3):
        raise ValueError(
            f"the weights of --root have a loss of {loss:.4f} before training, those of the runs "
            f"in the results {earlier['before']['loss']:.4f}: they would be compared as if they "
            "began alike. With --results DIR the contest is run anew, in a folder of its own"
        )


@torch.no_grad()
def measured(model: nn.Module, rows: Rows) -> dict[str, float]:
    """Mean loss and accuracy."""
    model.eval()
    device = next(model.parameters()).device
    loss = hits = 0.0
    for start in range(0, len(rows), 512):
        labels = rows.labels[start : start + 512].to(device)
        logits = model(rows.inputs[start : start + 512].to(device))
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        hits += float((logits.argmax(1) == labels).sum())
    model.train()
    return {"loss": loss / len(rows), "accuracy": hits / len(rows)}


def contest(name: str, part: Part) -> Contest:
    """Four mechanisms, by which the same weights are trained, with tables of these names."""
    accuracy = ACCURACY.replace("mean:% .1f", "accuracy.mean:% .2f")
    accuracy = accuracy.replace("half_width:% .1f", "accuracy.half_width:% .2f")
    tuning = "{@.tuning.score:.4f} ({@.tuning.rate}{@.tuning.more})"
    return Contest(
        title=f"arXiv by authors, {part.title}",
        script=__file__,
        tables={
            name: by_method(TITLES, LOSS + SEEDS, "{@.mean:.4f} (1)", NOT_RUN),
            f"{name}_accuracy": by_method(
                TITLES, accuracy + SEEDS, "{@.accuracy.mean:% .2f} (1)", NOT_RUN
            ),
            f"{name}_tuning": by_method(TITLES, tuning, NOT_RUN),
        },
        dataset_size=ROWS,
        methods=methods,
        epsilons=EPSILONS,
        rates=part.rates,
        tuning_seeds=(100,),
        seeds=(0, 1, 2, 3, 4),
        steps=STEPS,
        epoch_length=ROWS / BATCH,
        delta=DELTA,
        max_grad_norm=10.0,
        momentum=0.0,
        physical_batch_size=part.rows,
        run=functools.partial(run, part),
        score="loss",
        population=graph,
    )


if __name__ == "__main__":
    assert __doc__ is not None
    names = {"head": "arxiv_fig5", "whole": "arxiv_fig5_whole"}
    run_contest(
        {part: contest(name, PARTS[part]) for part, name in names.items()},
        __doc__.split("\n\n")[0],
        {part: HERE / "results" / name for part, name in names.items()},
    )
