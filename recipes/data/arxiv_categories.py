"""The classes of the arXiv recipe: arXiv's archives, a list that is public and never learnt."""

from __future__ import annotations

# The archives of arXiv's category taxonomy (https://arxiv.org/category_taxonomy). A fixed list:
# labels read off the data would tell, past the guarantee, which categories occur in it.
ARCHIVES = (
    "astro-ph",
    "cond-mat",
    "cs",
    "econ",
    "eess",
    "gr-qc",
    "hep-ex",
    "hep-lat",
    "hep-ph",
    "hep-th",
    "math",
    "math-ph",
    "nlin",
    "nucl-ex",
    "nucl-th",
    "physics",
    "q-bio",
    "q-fin",
    "quant-ph",
    "stat",
)
OTHER = "other"
CLASSES = (*ARCHIVES, OTHER)

# Archives that arXiv closed, and those that took them in (https://arxiv.org/archive).
SUBSUMED = {
    "acc-phys": "physics",
    "adap-org": "nlin",
    "alg-geom": "math",
    "ao-sci": "physics",
    "atom-ph": "physics",
    "bayes-an": "physics",
    "chao-dyn": "nlin",
    "chem-ph": "physics",
    "cmp-lg": "cs",
    "comp-gas": "nlin",
    "dg-ga": "math",
    "funct-an": "math",
    "mtrl-th": "cond-mat",
    "patt-sol": "nlin",
    "plasm-ph": "physics",
    "q-alg": "math",
    "solv-int": "nlin",
    "supr-con": "cond-mat",
}
_NUMBERS = {name: number for number, name in enumerate(CLASSES)}


def class_of(categories: str) -> int:
    """Number (in ``CLASSES``) of a paper's archive, that of its primary category.

    Args:
        categories: the snapshot's field, separated by spaces, the primary one first, such as
            ``"math.CO cs.DM"``. An archive that is not on the list counts as ``OTHER``.
    """
    archive = categories.split()[0].partition(".")[0].lower()
    return _NUMBERS.get(SUBSUMED.get(archive, archive), _NUMBERS[OTHER])
