"""Packages that only some of the data needs, and what to do where they are missing or broken."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

import torch


def torchvision_part(part: str, *, purpose: str) -> ModuleType:
    """The module ``torchvision.<part>``.

    Args:
        part: ``"datasets"``, ``"transforms.v2"``.
        purpose: what it is needed for, as the subject of the error's sentence.

    Raises:
        ValueError: if torchvision is not installed, or is but does not load beside this torch: it
            holds compiled operators, so a CUDA build beside a CPU torch, or another release, fails.
    """
    try:
        return importlib.import_module(f"torchvision.{part}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "torchvision":
            problem = "torchvision is not installed"
            remedy = "install the release made for it from the package index that torch came from"
        else:
            problem = f"torchvision needs the package {error.name}, which is not installed"
            remedy = f"install {error.name}"
        raise _unavailable(purpose, problem, remedy) from error
    except Exception as error:  # whatever a library for another torch raises while it loads
        reason = (str(error).splitlines() or [""])[0]
        raise _unavailable(
            purpose,
            f"torchvision {_version()} is installed but does not load "
            f"({type(error).__name__}: {reason})",
            "the two must be of matching releases and both CPU or both the same CUDA build: "
            "uninstall torchvision and install the one made for this torch, from the package index "
            "that torch came from",
        ) from error


def vision_package(module: str, *, purpose: str) -> ModuleType:
    """A module of a package that the ``vision`` extra brings, torchvision's own apart.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{purpose} needs a package that is not installed ({error}); install what images need, "
            'e.g. with pip install -e ".[vision]"'
        ) from error


def _unavailable(purpose: str, problem: str, remedy: str) -> ValueError:
    return ValueError(
        f"{purpose} needs torchvision beside torch {torch.__version__}: {problem}; {remedy}"
    )


def _version() -> str:
    try:
        return importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
