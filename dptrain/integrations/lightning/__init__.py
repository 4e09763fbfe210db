"""Private training in Lightning's ``Trainer``: a callback, and the ``LightningModule`` as it is."""

try:
    import lightning.pytorch as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"dptrain.integrations.lightning needs the package lightning ({error}): "
        'pip install "dptrain[lightning]"'
    ) from error

from dptrain.integrations.lightning.callback import CHECKPOINT_KEY, PrivateCallback

__all__ = ["CHECKPOINT_KEY", "PrivateCallback"]
