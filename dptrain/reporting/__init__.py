"""What is written of a run: guarantees, reports and plots."""

from dptrain.reporting.individual_report import IndividualReport

__all__ = ["IndividualReport"]
