"""Private training inside the trainers of other libraries, each behind an extra of its own."""

__all__: list[str] = []
