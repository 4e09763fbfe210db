"""A private run in a loop that is written with Hugging Face's accelerate."""

from dptrain.integrations.accelerate.preparing import prepare

__all__ = ["prepare"]
