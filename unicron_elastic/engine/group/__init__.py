"""Process groups that outlive worlds: the back end "unicron", whose groups have an inside that is exchanged."""

from __future__ import annotations

from unicron_elastic.engine.group.gloo_inside import GlooInside
from unicron_elastic.engine.group.register import register
from unicron_elastic.engine.group.stable_group import StableGroup

__all__ = ["NAME", "GlooInside", "StableGroup", "register"]

NAME = "unicron"

register(NAME, GlooInside, inside="gloo")
