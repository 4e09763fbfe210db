"""A package of somebody else's: one member of every family of dptrain that is open.

Nothing here is imported by dptrain, and nothing is imported from it but the faces of its rooms.
Importing this package registers what it brings.
"""

from stranger_dp.accountant import CohortAccountant
from stranger_dp.cohort import Cohort
from stranger_dp.fading import Fading
from stranger_dp.layer import Shift
from stranger_dp.noise import FadingStream

__all__ = ["Cohort", "CohortAccountant", "Fading", "FadingStream", "Shift"]
