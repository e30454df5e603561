"""unicron-elastic keeps large-model training alive.

Importing this package costs milliseconds: it imports neither torch nor anything else that is slow.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
