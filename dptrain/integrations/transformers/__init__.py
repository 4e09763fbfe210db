"""The ``Trainer`` of Hugging Face, made private: three changed lines (extra ``trainer``)."""

from dptrain.integrations.transformers.arguments import PrivacyArguments
from dptrain.integrations.transformers.trainer import PrivateTrainer, PrivateTrainerMixin

__all__ = ["PrivacyArguments", "PrivateTrainer", "PrivateTrainerMixin"]
