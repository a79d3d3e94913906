"""The demonstration: ``python -m ddpfix.demo``."""
