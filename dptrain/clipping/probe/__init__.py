"""Runs of the module on a few rows that show whether its layers keep the examples apart."""

from dptrain.clipping.probe.outputs import attributes
from dptrain.clipping.probe.passes import AtHand
from dptrain.clipping.probe.probe import PROBES, RowProbe
from dptrain.clipping.probe.restoring import eagerly, untouched
from dptrain.clipping.probe.witness import Witness

__all__ = ["PROBES", "AtHand", "RowProbe", "Witness", "attributes", "eagerly", "untouched"]
