"""The directory that ``python -m ddpfix --path`` prints, to be put on ``PYTHONPATH``."""
