"""Small files in the real formats: a metadata snapshot or archive, a tokenizer, a tiny BERT.

The abstracts are made of the words of their category, so that both heads have something to learn;
few authors write much and most write little, as on arXiv.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import lzma
import pathlib
import zipfile
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOPICS = {
    "cs.LG stat.ML": """network layer gradient training loss classifier batch feature label kernel
        robust sparse attention encoder decoder image speech reward policy agent""",
    "math.CO": """graph vertex edge matching tree coloring clique bound lemma permutation integer
        lattice polytope partition sequence cycle path degree random extremal""",
    "hep-th gr-qc": """string brane gauge gravity horizon entropy symmetry anomaly boson fermion
        duality vacuum tensor field coupling holography dimension black hole quantum""",
    "q-bio.NC": """neuron cortex synapse spike brain memory protein cell gene membrane growth tissue
        mutation species habitat enzyme receptor circuit rhythm sleep""",
}
COMMON = """we show that the a of in for with new result model method study this paper present
    large small simple general structure under between"""
FIRST = "Ada Bela Chen Dora Emil Fatima Goro Hana Igor Jana Kofi Lena Mira Nils Omar Pia"
LAST = """Abel Brandt Costa Dvorak Eriksen Farouk Grant Hirsch Ito Jensen Kovacs Lindqvist Moreau
    Novak Okafor Petrov Quist Rossi Sato Tanaka"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArxivFiles:
    """Where the files are: a file of JSON lines and two folders."""

    snapshot: pathlib.Path
    tokenizer: pathlib.Path
    model: pathlib.Path


def write_arxiv_files(
    folder: pathlib.Path, *, papers: int = 300, authors: int = 150, seed: int = 0
) -> ArxivFiles:
    """Write all of them into ``folder``."""
    records = make_papers(papers=papers, authors=authors, seed=seed)
    files = ArxivFiles(
        snapshot=folder / "snapshot.jsonl", tokenizer=folder / "tokenizer", model=folder / "model"
    )
    write_lines(files.snapshot, records)
    size = write_tokenizer(files.tokenizer, [record["abstract"] for record in records])
    write_config(files.model, vocabulary=size)
    return files


def make_papers(*, papers: int, authors: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of the snapshot's form, with the fields that the recipe does not read as well."""
    rng = np.random.default_rng(seed)
    last, first = LAST.split(), FIRST.split()
    names = [[family, given, ""] for given in first for family in last]
    # More authors than names: numbered ones.
    people = [[*names[n % len(names)][:2], str(n // len(names) or "")] for n in range(authors)]
    share = 1.0 / np.arange(2, authors + 2)  # few write much
    share /= share.sum()
    categories = list(TOPICS)
    records = []
    for number in range(papers):
        size = min(authors, int(rng.choice([1, 2, 3, 4, 5], p=[0.2, 0.35, 0.25, 0.15, 0.05])))
        members = rng.choice(authors, size=size, replace=False, p=share)
        category = categories[rng.integers(len(categories))]
        topic = rng.choice(TOPICS[category].split(), size=rng.integers(6, 12))
        filler = rng.choice(COMMON.split(), size=rng.integers(3, 6))
        words = rng.permutation(np.concatenate([topic, filler]))
        team = [people[member] for member in members]
        records.append(
            {
                "id": f"{1 + number // 1000:04d}.{number % 1000:05d}",
                "submitter": " ".join(reversed(team[0][:2])),
                "authors": ", ".join(f"{first} {last}" for last, first, *_ in team),
                "title": " ".join(words[:4]),
                "categories": category,
                "abstract": "  " + " ".join(words) + ".\n",
                "authors_parsed": team,
            }
        )
    return records


def write_lines(path: pathlib.Path, records: list[Any]) -> None:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


COLUMNS = (
    "abstract",
    "acm_class",
    "arxiv_id",
    "author_text",
    "categories",
    "comments",
    "created",
    "doi",
    "num_authors",
    "num_categories",
    "primary_cat",
    "title",
    "updated",
)


def archive_row(record: dict[str, Any], **changes: str) -> dict[str, str]:
    """The snapshot's record as a row of the archive, which has a comment over two lines.

    The archive knows no suffixes; here they are numbers that tell authors apart, and are kept.
    """
    categories = record["categories"].split()
    names = [f"{first} {last}{suffix}" for last, first, suffix, *_ in record["authors_parsed"]]
    return {
        "abstract": " ".join(record["abstract"].split()),
        "acm_class": "",
        "arxiv_id": record["id"],
        "author_text": ", ".join(names),
        "categories": ",".join(categories),
        "comments": 'the "second"\n  version',
        "created": f"20{10 + int(record['id'][-2:]) % 3}-05-01",
        "doi": "",
        "num_authors": str(len(names)),
        "num_categories": str(len(categories)),
        "primary_cat": categories[0],
        "title": record["title"],
        "updated": "",
        **changes,
    }


def table(rows: list[dict[str, str]], *, more: tuple[str, ...] = ("created_ym",)) -> bytes:
    """Rows as pandas writes them: a first column without a name, and quotes where needed."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["", *COLUMNS, *more])
    for number, row in enumerate(rows):
        writer.writerow([1000 + 7 * number, *(row[name] for name in COLUMNS), *["x"] * len(more)])
    return text.getvalue().encode()


def write_table(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """The table as ``path``'s suffix says: plain, .xz or .zip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(content))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr(f"processed_data/{path.stem}", content)
    else:
        path.write_bytes(content)
    return path


def write_archive(folder: pathlib.Path, rows: list[dict[str, str]]) -> pathlib.Path:
    """A table for each category, in one dump's folder below ``folder``."""
    named = {name for row in rows for name in row["categories"].split(",")}
    for name in sorted(named):
        own = [row for row in rows if name in row["categories"].split(",")]
        path = folder / "processed_data" / "20200101" / "per_category" / f"{name}.tsv.xz"
        write_table(path, table(own))
    return folder


def write_tokenizer(folder: pathlib.Path, texts: list[str], *, size: int = 400) -> int:
    """Train a WordPiece tokenizer and save it as AutoTokenizer reads it; returns its size."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(names, SPECIAL, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def write_config(folder: pathlib.Path, *, vocabulary: int, hidden: int = 32) -> None:
    """The configuration of a tiny BERT, as a model's folder on the hub has it.

    Its random weights are larger than BERT's, which at this width would take long to leave the
    plateau that training from scratch begins on.
    """
    folder.mkdir(parents=True)
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    (folder / "config.json").write_text(json.dumps(config))
