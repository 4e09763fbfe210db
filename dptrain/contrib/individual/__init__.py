"""A privacy budget for every example: the filters of ``dptrain.individual``, and their reports."""

from dptrain.contrib.individual.budget_curve import filter_profile
from dptrain.contrib.individual.gdp import GDPFilter, GDPRecord
from dptrain.contrib.individual.odometer import GDPOdometer, OdometerRecord
from dptrain.contrib.individual.pld import PLDFilter
from dptrain.contrib.individual.pld_record import PLDRecord
from dptrain.contrib.individual.renyi import RenyiFilter, RenyiRecord
from dptrain.contrib.individual.report import IndividualReport
from dptrain.contrib.individual.report_groups import GroupRow, GroupTable
from dptrain.contrib.individual.report_plots import plot_active, plot_groups, plot_histogram
from dptrain.contrib.individual.sampled_record import SampledRecord

__all__ = [
    "GDPFilter",
    "GDPOdometer",
    "GDPRecord",
    "GroupRow",
    "GroupTable",
    "IndividualReport",
    "OdometerRecord",
    "PLDFilter",
    "PLDRecord",
    "RenyiFilter",
    "RenyiRecord",
    "SampledRecord",
    "filter_profile",
    "plot_active",
    "plot_groups",
    "plot_histogram",
]
