"""A privacy budget for every example: the filters of ``dptrain.individual``, and their reports."""

from dptrain.contrib.individual.budget_curve import filter_profile
from dptrain.contrib.individual.gdp import GDPFilter, GDPRecord
from dptrain.contrib.individual.norm_grid import NormGrid
from dptrain.contrib.individual.odometer import GDPOdometer, OdometerRecord
from dptrain.contrib.individual.renyi import RenyiFilter
from dptrain.contrib.individual.renyi_record import RenyiRecord
from dptrain.contrib.individual.report import IndividualReport
from dptrain.contrib.individual.report_groups import GroupRow, GroupTable
from dptrain.contrib.individual.report_plots import (
    DECADES,
    bound_line,
    plain_ticks,
    plot_active,
    plot_histogram,
    private_figure,
    save_private_figure,
)

__all__ = [
    "DECADES",
    "GDPFilter",
    "GDPOdometer",
    "GDPRecord",
    "GroupRow",
    "GroupTable",
    "IndividualReport",
    "NormGrid",
    "OdometerRecord",
    "RenyiFilter",
    "RenyiRecord",
    "bound_line",
    "filter_profile",
    "plain_ticks",
    "plot_active",
    "plot_histogram",
    "private_figure",
    "save_private_figure",
]
