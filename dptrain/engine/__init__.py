"""The privacy engine: from a module, an optimizer and a loader to a private run."""

from dptrain.engine.arguments import LIMITS, CommonArguments, takes
from dptrain.engine.joined import JoinedOptimizer
from dptrain.engine.options import Gradients, Loading, NoiseOptions
from dptrain.engine.privacy_engine import PrivacyEngine
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.release_ledger import StepLedger
from dptrain.engine.scaled_adam import ScaledAdam
from dptrain.engine.sealed import check_seal, seal

__all__ = [
    "LIMITS",
    "CommonArguments",
    "Gradients",
    "JoinedOptimizer",
    "Loading",
    "NoiseOptions",
    "PrivacyEngine",
    "PrivateTraining",
    "ScaledAdam",
    "StepLedger",
    "check_seal",
    "seal",
    "takes",
]
