"""Programs as people write them by hand, by name."""

from handwritten import modules, python_code, training
from handwritten.case import MODELS, D, Mlp

__all__ = ["MODELS", "D", "Mlp", "modules", "python_code", "training"]
