"""A node that leaves its job: out of the rendezvous, which goes on without it, and into quarantine."""

from __future__ import annotations
