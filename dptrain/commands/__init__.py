"""The commands of ``dptrain``, one file each: ``add(commands)`` declares one."""

from dptrain.commands import cli
from dptrain.commands.cli import main

__all__ = ["cli", "main"]
