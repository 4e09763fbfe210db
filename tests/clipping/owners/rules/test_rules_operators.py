"""Owner maps of every operator of torch's database claim no more than perturbation shows."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from tests.clipping.owners.claims import claim, wrong
from tests.clipping.owners.samples import CRASHING, Call, calls
from tests.helpers.dependence import Program, Unsteady, dependence, with_gradients
from tests.helpers.torch_databases import operators

SHARES = 48  # of the operators, each a test
SLOW_SAMPLES = 12

# Forms of call of which the one that is tried shows nothing, by what hinders.
_REASONS = {
    "cannot be called: AssertionError": [
        "jiterator_2inputs_2outputs, function",
        "jiterator_4inputs_with_extra_args, function",
        "jiterator_binary, function",
        "jiterator_binary_return_by_ref, function",
        "jiterator_unary, function",
    ],
    "cannot be called: RuntimeError": [
        "_batch_norm_with_update, out",
        "linalg.eig, function",
        "sparse.mm.reduce, function",
        "sparse.sampled_addmm, function",
        "sparse.sampled_addmm, out",
    ],
    "cannot be called: TypeError": ["equal, out", "histogramdd, out", "nonzero, out"],
    "cannot be tried": [
        "_segment_reduce.lengths, function",
        "_segment_reduce.offsets, function",
        "arange, function",
        "broadcast_shapes, function",
        "empty, function",
        "empty_permuted, function",
        "empty_strided, function",
        "eye, function",
        "full, function",
        "linspace, function",
        "logspace, function",
        "nn.functional.batch_norm.without_cudnn, function",
        "nn.functional.pixel_shuffle, function",
        "nn.functional.pixel_unshuffle, function",
        "ones, function",
        "randint, function",
        "randn, function",
        "scalar_tensor, function",
        "signal.windows.bartlett, function",
        "signal.windows.blackman, function",
        "signal.windows.cosine, function",
        "signal.windows.exponential, function",
        "signal.windows.gaussian, function",
        "signal.windows.general_cosine, function",
        "signal.windows.general_hamming, function",
        "signal.windows.hamming, function",
        "signal.windows.hann, function",
        "signal.windows.kaiser, function",
        "signal.windows.nuttall, function",
        "torch._scaled_mm, function",
        "torch._scaled_mm_v2, function",
        "torch.ops.aten._efficient_attention_forward, function",
        "torch.ops.aten._flash_attention_forward, function",
        "tril_indices, function",
        "triu_indices, function",
        "zeros, function",
    ],
    "escapes": [
        "argwhere, function",
        "bincount, function",
        "combinations, function",
        "cov, function",
        "index_fill, function",
        "index_fill, in place",
        "index_put, function",
        "index_put, in place",
        "linalg.lstsq, function",
        "linalg.lstsq, out",
        "linalg.lstsq.grad_oriented, function",
        "masked_select, function",
        "masked_select, out",
        "nn.functional.gaussian_nll_loss, function",
        "nonzero, function",
        "nonzero_static, function",
        "repeat_interleave, function",
        "to_sparse, function",
        "unique, function",
        "unique_consecutive, function",
    ],
    "returns what is in memory": [
        "empty_like, function",
        "new_empty, function",
        "new_empty_strided, function",
    ],
    "returns no tensors": ["allclose, function", "equal, function", "item, function"],
    "torch computes it otherwise under any dispatch mode": [
        "linalg.matrix_rank, out",
        "linalg.matrix_rank.hermitian, out",
        "masked.prod, function",
    ],
}
UNSHOWN = {form: why for why, forms in _REASONS.items() for form in forms}


def shown(call: Call) -> str:
    """An empty string where a call was checked and is right, else what hinders or what is wrong.

    Raises:
        AssertionError: if a map claims what is not so.
    """
    if "empty" in call.form:
        return "returns what is in memory"
    program = with_gradients(call.program, by=call.leaves) if call.leaves else call.program
    try:
        truth = dependence(program, call.arguments, avoid=call.avoid)
    except Unsteady:
        return "its results differ from call to call"
    except Exception as error:
        return f"cannot be called: {type(error).__name__}"
    if not truth.results:
        return "returns no tensors"
    if not any(truth.tries):
        return "takes no other numbers"
    found = claim(program, call.arguments)
    if found.escapes:
        return "escapes"
    if said := wrong(found, truth):
        beneath = dependence(_with_a_mode(program), call.arguments, avoid=call.avoid)
        assert not wrong(found, beneath), said[0]
        return "torch computes it otherwise under any dispatch mode"
    return ""


class _Nothing(TorchDispatchMode):
    """A mode that changes nothing, for which torch takes other formulas all the same."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _with_a_mode(program: Program) -> Program:
    def under(*values: Tensor) -> Any:
        with _Nothing():
            return program(*values)

    return under


def examine(share: int, samples: int) -> dict[str, str]:
    """Check calls of a share's operators.

    Returns:
        Forms of which no call showed anything, and why.

    Raises:
        AssertionError: with every call of which a map claims too much.
    """
    reasons: dict[str, set[str]] = collections.defaultdict(set)
    said = []
    for op in operators()[share::SHARES]:
        found = list(_calls(op, samples))
        if not found:
            reasons[f"{op.full_name}, function"].add("cannot be tried")
        for call in found:
            try:
                reasons[call.form].add(shown(call))
            except Exception as error:
                said.append(f"{call.name}: {error or type(error).__name__}")
    assert not said, f"{len(said)} calls:\n" + "\n".join(said)
    return {form: "; ".join(sorted(why)) for form, why in reasons.items() if "" not in why}


def _calls(op: Any, samples: int) -> Iterator[Call]:
    """None where samples need a device that is not there, or a call can end the process."""
    if op.full_name in CRASHING:
        return
    try:
        yield from calls(op, samples)
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise


def unshown(share: int, pinned: dict[str, str]) -> dict[str, str]:
    """Of what is pinned, the forms of a share's operators."""
    names = {op.full_name for op in operators()[share::SHARES]}
    return {form: why for form, why in pinned.items() if form.rsplit(", ", 1)[0] in names}


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.filterwarnings("ignore")
def test_maps_of_operators_claim_no_more_than_is_so(share: int) -> None:
    assert examine(share, 1) == unshown(share, UNSHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.filterwarnings("ignore")
def test_maps_of_many_samples_claim_no_more_than_is_so(share: int) -> None:
    examine(share, SLOW_SAMPLES)
