"""Contracts that every member of a family must fulfil: subclass them in pytest modules.

``check_layer_rule`` and ``check_norms_of_releases`` are functions: call them on a layer.
"""

from dptrain.testing.accountant_contract import AccountantContract
from dptrain.testing.layer_rule import check_layer_rule
from dptrain.testing.noise_stream_contract import NoiseStreamContract
from dptrain.testing.norms_of_releases import check_norms_of_releases
from dptrain.testing.scheme_contract import ExchangeableSchemeContract, SchemeContract
from dptrain.testing.strategy_contract import StrategyContract

__all__ = [
    "AccountantContract",
    "ExchangeableSchemeContract",
    "NoiseStreamContract",
    "SchemeContract",
    "StrategyContract",
    "check_layer_rule",
    "check_norms_of_releases",
]
