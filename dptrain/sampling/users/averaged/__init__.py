"""Users whose examples are averaged before they are clipped: the scheme, and what it draws."""

from dptrain.sampling.users.averaged.per_user import PerUser

__all__ = ["PerUser"]
