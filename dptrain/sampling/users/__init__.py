"""User-level sampling: attribution graphs, their bounds, and schemes over them."""
