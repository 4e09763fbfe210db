"""Data readers of the recipes."""

from recipes.data.cifar import cifar10
from recipes.data.cinic import cinic10
from recipes.data.digits import digits
from recipes.data.images import Images
from recipes.data.split import Split

__all__ = ["Images", "Split", "cifar10", "cinic10", "digits"]
