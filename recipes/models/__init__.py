"""Models of the recipes."""

from recipes.models.vgg import vgg

__all__ = ["vgg"]
