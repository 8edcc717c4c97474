"""Twofold: hybrid CPU+GPU inference for Mixture-of-Experts models, every decision priced and on show."""

__version__ = "0.1.0"
