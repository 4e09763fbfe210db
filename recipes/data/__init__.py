"""Data readers of the recipes."""

from recipes.data.augment import Views
from recipes.data.cifar import cifar10
from recipes.data.cinic import cinic10
from recipes.data.class_folders import image_folder
from recipes.data.digits import digits
from recipes.data.images import Images
from recipes.data.mnist import mnist
from recipes.data.saved import saved_images
from recipes.data.split import Split

__all__ = [
    "Images",
    "Split",
    "Views",
    "cifar10",
    "cinic10",
    "digits",
    "image_folder",
    "mnist",
    "saved_images",
]
