"""ε of single examples, from counts of their gradient norms: Figure 1 of Koskela et al. 2023."""

from scripts.paper.individual_losses.pld import IndividualPLD
from scripts.paper.individual_losses.renyi import IndividualRenyi

__all__ = ["IndividualPLD", "IndividualRenyi"]
