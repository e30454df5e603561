"""Lightning's Trainer goes on in place: ``strategy=InPlaceStrategy()`` is the one argument more."""

from unicron_elastic.lightning.in_place_strategy import InPlaceStrategy

__all__ = ["InPlaceStrategy"]
