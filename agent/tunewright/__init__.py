"""Tunewright: an autotuner that finds, proves and safely rolls out vLLM configurations."""

__version__ = "0.1.0"
