"""Complete runs to copy: each states everything it does and writes a run folder."""
