"""Products of matrices, and operators on whole ones."""

from __future__ import annotations

import torch

from dptrain.clipping.owners.maps import join, join_all, join_along
from dptrain.clipping.owners.rules.along import fits, without
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule


@rule("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation")
def product(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with a column of the second, and what is added."""
    pairs = [("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("mat", "vec")]
    pairs += [("self", "vec"), ("self", "tensor"), ("self", "other")]
    left, right = next((a, b) for a, b in pairs if call.has(a) and call.has(b))
    first, second = call.map(left), call.map(right)
    rows = join_along(first, [-1])
    if second.dim() == 1:
        found = join(rows.squeeze(-1), join_all(second))
    else:
        found = join(rows, join_along(second, [-2]))
    if call.name == "addbmm":
        found = join_along(found, [0]).squeeze(0)
    if call.name in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"):
        found = join(call.map("self"), found)
    return [found]


@rule("linear")
def linear(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """x Wᵀ + b."""
    weight = join_along(call.map("weight"), [-1]).squeeze(-1)
    return [join(join_along(call.map("input"), [-1]), weight, call.map("bias"))]


@rule("_cdist_forward")
def distances(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with a row of the second."""
    first, second = (join_along(call.map(n), [-1]) for n in ("x1", "x2"))
    return [join(first, second.transpose(-1, -2))]


@rule("_cdist_backward")
def distances_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A row of the first with all of the second."""
    each = join(call.map("grad"), call.map("cdist"), join_along(call.map("x1"), [-1]))
    other = join_along(call.map("x2"), [-1, -2])
    return [join(join_along(each, [-1]), other)]


@rule("multinomial")
def drawn(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by the weights of a row."""
    return [join_along(call.map("self"), [-1])]


@rule("_trilinear")
def trilinear(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """A sum over products of three that are expanded to the same dimensions."""
    parts = []
    for k in (1, 2, 3):
        m = call.map(f"i{k}")
        for d in sorted(call[f"expand{k}"]):
            m = m.unsqueeze(d)
        parts.append(m)
    every = join(*parts)
    dims = [d % every.dim() for d in call["sumdim"]]
    return [without(join_along(every, dims), dims)] if dims else [every]


_MATRICES = names("""
    linalg_inv_ex linalg_cholesky_ex cholesky _linalg_svd _linalg_eigh linalg_eig linalg_qr
    linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet linalg_matrix_exp linalg_pinv
    linalg_householder_product linalg_solve_triangular _linalg_solve_ex cholesky_solve
    cholesky_inverse triangular_solve linalg_ldl_factor_ex lu_unpack geqrf
    _linalg_eigvals linalg_eigvals
""")


@rule(*_MATRICES)
def of_matrices(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """All of a matrix, of each in a batch of them."""
    maps = [m for m in call.maps() if m.dim() >= 2]
    if len(maps) != len(call.maps()):
        return [join(*(join_all(m) for m in call.maps())) for _ in results]
    each = join(*(join_along(m, [-1, -2]) for m in maps))
    batch = each[..., 0, 0]
    found: list[Map] = []
    for t in results:
        inner = t.dim() - batch.dim()
        grown = batch.reshape((*batch.shape, *[1] * inner)) if inner >= 0 else batch
        found.append(grown if fits(grown, t) else join_all(batch))
    return found
