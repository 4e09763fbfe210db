"""Models of the recipes."""

from recipes.models.vgg import check_vgg, vgg

__all__ = ["check_vgg", "vgg"]
