"""Incidents: how they are kept, and how they are told."""
