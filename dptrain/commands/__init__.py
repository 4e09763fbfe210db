"""The commands of ``dptrain``, one file each: ``add(commands)`` declares one."""

from dptrain.commands import cli, plan, train
from dptrain.commands.cli import main
from dptrain.commands.parser import CommandParser

__all__ = ["CommandParser", "cli", "main", "plan", "train"]
