"""Differentially private training for PyTorch: schemes, correlated noise and their accountant.

``import dptrain`` costs nothing: a name, or a room such as ``dptrain.sampling``, is imported when
it is first asked for. Type checkers see the imports below as they stand.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dptrain._on_demand import names_of

if TYPE_CHECKING:
    from dptrain.accounting import (
        account,
        accountants_for,
        calibrate,
        profile,
        register_accountant,
    )
    from dptrain.clipping import fix, freeze_batchnorm
    from dptrain.clipping.base import Automatic, ClippingStyle, Flat, PerGroup, PerLayer
    from dptrain.clipping.bookkeeping import GradientRule, LayerRule, register_layer
    from dptrain.core import Adjacency, Guarantee, Kind, Unit
    from dptrain.engine import (
        Gradients,
        JoinedOptimizer,
        Loading,
        NoiseOptions,
        PrivacyEngine,
        PrivateTraining,
        ScaledAdam,
    )
    from dptrain.mechanism import MatrixMechanism
    from dptrain.noise import register_noise_stream
    from dptrain.sampling import (
        AttributionGraph,
        BallsInBins,
        CyclicPoisson,
        GraphPartition,
        MinSep,
        PerUser,
        Poisson,
        PrivateLoader,
        RandomAllocation,
        Shuffled,
        UserCyclic,
        UserFixed,
        UserMinSep,
        register_scheme,
    )
    from dptrain.strategies import (
        BISR,
        BLT,
        BSR,
        BandInvMF,
        BandMF,
        ColumnNormalizedBandMF,
        Dense,
        Identity,
        LambdaCGD,
        SquareRoot,
        Tree,
        TreeRestart,
        register_strategy,
    )

__version__ = "0.1.0"
"""Version of the package, which pyproject.toml reads from here."""

__all__ = [
    "BISR",
    "BLT",
    "BSR",
    "Adjacency",
    "AttributionGraph",
    "Automatic",
    "BallsInBins",
    "BandInvMF",
    "BandMF",
    "ClippingStyle",
    "ColumnNormalizedBandMF",
    "CyclicPoisson",
    "Dense",
    "Flat",
    "GradientRule",
    "Gradients",
    "GraphPartition",
    "Guarantee",
    "Identity",
    "JoinedOptimizer",
    "Kind",
    "LambdaCGD",
    "LayerRule",
    "Loading",
    "MatrixMechanism",
    "MinSep",
    "NoiseOptions",
    "PerGroup",
    "PerLayer",
    "PerUser",
    "Poisson",
    "PrivacyEngine",
    "PrivateLoader",
    "PrivateTraining",
    "RandomAllocation",
    "ScaledAdam",
    "Shuffled",
    "SquareRoot",
    "Tree",
    "TreeRestart",
    "Unit",
    "UserCyclic",
    "UserFixed",
    "UserMinSep",
    "__version__",
    "account",
    "accountants_for",
    "calibrate",
    "fix",
    "freeze_batchnorm",
    "profile",
    "register_accountant",
    "register_layer",
    "register_noise_stream",
    "register_scheme",
    "register_strategy",
]

# Where a name comes from; a test holds the two lists and the imports above together.
_found, _names = names_of(
    __name__,
    {
        "dptrain.accounting": "account accountants_for calibrate profile register_accountant",
        "dptrain.clipping": "fix freeze_batchnorm",
        "dptrain.clipping.base": "Automatic ClippingStyle Flat PerGroup PerLayer",
        "dptrain.clipping.bookkeeping": "GradientRule LayerRule register_layer",
        "dptrain.core": "Adjacency Guarantee Kind Unit",
        "dptrain.engine": (
            "Gradients JoinedOptimizer Loading NoiseOptions PrivacyEngine PrivateTraining "
            "ScaledAdam"
        ),
        "dptrain.mechanism": "MatrixMechanism",
        "dptrain.noise": "register_noise_stream",
        "dptrain.sampling": (
            "AttributionGraph BallsInBins CyclicPoisson GraphPartition MinSep PerUser Poisson "
            "PrivateLoader RandomAllocation Shuffled UserCyclic UserFixed UserMinSep "
            "register_scheme"
        ),
        "dptrain.strategies": (
            "BISR BLT BSR BandInvMF BandMF ColumnNormalizedBandMF Dense Identity LambdaCGD "
            "SquareRoot Tree TreeRestart register_strategy"
        ),
    },
)
_ROOMS = [
    "accounting",
    "auditing",
    "clipping",
    "commands",
    "configuration",
    "contrib",
    "core",
    "distributed",
    "engine",
    "individual",
    "integrations",
    "losses",
    "mechanism",
    "noise",
    "planning",
    "reporting",
    "sampling",
    "strategies",
    "testing",
]


# Names of Opacus's, and what is written here.
_OF_OPACUS = {
    "BatchMemoryManager": "make_private(..., loading=Loading(max_physical_batch_size=...))",
    "ModuleValidator": "dptrain.fix(model)",
    "GradSampleModule": "PrivacyEngine().make_private(...), whose module is your own",
    "DPOptimizer": "PrivacyEngine().make_private(...), which returns the optimizer",
    "DPDataLoader": "PrivacyEngine().make_private(...), which returns the loader",
    "RDPAccountant": "dptrain.account(mechanism, delta=...)",
    "PRVAccountant": "dptrain.account(mechanism, delta=...)",
    "get_noise_multiplier": "dptrain.calibrate(scheme=..., strategy=..., epsilon=..., delta=...)",
    **dict.fromkeys(
        ("DPLSTM", "DPGRU", "DPRNN", "DPMultiheadAttention"),
        "the layer of torch.nn, which is trained as it is",
    ),
}


def __getattr__(name: str) -> Any:
    """A public name or a room of the package, imported now (PEP 562)."""
    if name in _OF_OPACUS:
        # Of an AttributeError "from dptrain import ..." would drop the text.
        raise ImportError(f"dptrain has no {name}: write {_OF_OPACUS[name]}")
    if name in _ROOMS:
        return importlib.import_module(f"dptrain.{name}")
    return _found(name)


def __dir__() -> list[str]:
    """Names that can be asked for, imported or not."""
    return sorted({*_names(), *_ROOMS})
