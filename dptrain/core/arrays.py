"""The array type of the mathematics: NumPy in double precision."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
"""A NumPy array of float64 numbers."""
