"""Papers outside of a run on arXiv: what a tokenizer and first weights may be made from.

They are taken to be public. That is an assumption, as with any public data, and a stronger one
here: which papers they are follows from who wrote with whom, so whoever sees a tokenizer made from
them learns that their authors are in no training paper. The guarantee is for the contents of a
graph that is public as it is; it does not hide who is in the graph, and this does not either.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from recipes.data.arxiv import Rows, Selection
from recipes.data.arxiv_cached import Snapshot
from recipes.data.packages import package

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outside:
    """Papers none of whose authors wrote a paper that the run could have been trained on.

    Attributes:
        rows: of the snapshot, ascending.
        single: how many have one author, and so would have been dropped anyhow.
        of_users: papers that are neither held out nor trained on, and yet not outside: an author of
            theirs is a user of the training graph.
        of_bounded_away: the same, with authors whom contribution bounding left no paper.
    """

    rows: Rows
    single: int
    of_users: int
    of_bounded_away: int


def outside_papers(snapshot: Snapshot, chosen: Selection) -> Outside:
    """The papers outside, of everything that was read.

    It is not enough that a paper is not trained on: most papers of a single author, which are
    dropped, are by people who are users through other papers. Authors of a paper that bounding
    dropped are no users of the graph that it kept; their papers are left out here all the same, so
    that the choice does not depend on what bounding did. Held-out papers stay held out.

    Args:
        snapshot: all papers.
        chosen: training and held-out papers of the run.

    Raises:
        ValueError: if no paper is outside.
    """
    chunks = snapshot.papers.data.column("authors").chunks
    counts = np.concatenate([np.diff(chunk.offsets) for chunk in chunks])
    arrow = package("pyarrow")
    names = arrow.chunked_array([chunk.flatten() for chunk in chunks]).combine_chunks()
    authors = names.dictionary_encode().indices.to_numpy()
    papers = np.repeat(np.arange(len(counts)), counts)

    def shares_an_author(rows: Rows) -> np.ndarray:
        """True for each paper that has an author of one of ``rows``."""
        among = np.zeros(len(counts), dtype=bool)
        among[rows] = True
        known = np.zeros(int(authors.max(initial=-1)) + 1, dtype=bool)
        known[authors[among[papers]]] = True
        return np.bincount(papers, weights=known[authors], minlength=len(counts)) > 0

    free = np.ones(len(counts), dtype=bool)
    free[chosen.test] = False
    of_users = free & shares_an_author(chosen.train)
    of_candidates = free & shares_an_author(chosen.candidates)
    rows = np.flatnonzero(free & ~of_candidates)
    if not len(rows):
        raise ValueError(
            "every paper has an author who wrote one of the training papers: nothing is outside to "
            "make a tokenizer or weights from; take those of another source"
        )
    trained_on = np.zeros(len(counts), dtype=bool)
    trained_on[chosen.train] = True
    trained_on[chosen.candidates] = True
    return Outside(
        rows=rows,
        single=int((counts[rows] == 1).sum()),
        of_users=int((of_users & ~trained_on).sum()),
        of_bounded_away=int((of_candidates & ~of_users & ~trained_on).sum()),
    )


def train_tokenizer(texts: Iterable[str], folder: pathlib.Path, *, size: int) -> Any:
    """A WordPiece tokenizer in BERT's form, made of ``texts``; also saved, for ``load_tokenizer``.

    Args:
        texts: public ones; the tokenizer tells of them.
        folder: made if missing.
        size: tokens, the special ones included; fewer if the texts do not give as many.

    Raises:
        ValueError: if ``size`` leaves no room for a token of text.
    """
    if size <= len(SPECIAL):
        raise ValueError(f"size={size}: must be above {len(SPECIAL)}, the special tokens")
    tokenizers = package("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=SPECIAL["unk"]))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    ends = [(SPECIAL[name], made.token_to_id(SPECIAL[name])) for name in ("cls", "sep")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SPECIAL['cls']} $A {SPECIAL['sep']}",
        pair=f"{SPECIAL['cls']} $A {SPECIAL['sep']} $B:1 {SPECIAL['sep']}:1",
        special_tokens=ends,
    )
    whole = package("transformers").PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": token for name, token in SPECIAL.items()}
    )
    whole.save_pretrained(str(folder))
    return whole
