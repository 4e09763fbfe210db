"""Loggers of a private run, which get what may be released: TensorBoard, Weights & Biases, MLflow.

Each tool is an optional package, imported when a logger is made:
``pip install "dptrain[loggers]"``.
"""

from dptrain.integrations.loggers.run_loggers import TOOLS, RunLoggers, check_installed
from dptrain.integrations.loggers.tools import Tool

__all__ = ["TOOLS", "RunLoggers", "Tool", "check_installed"]
