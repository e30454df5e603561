"""Accelerate goes on in place: ``InPlaceAccelerator`` stands for its ``Accelerator``."""

from unicron_elastic.accelerate.in_place_accelerator import InPlaceAccelerator

__all__ = ["InPlaceAccelerator"]
