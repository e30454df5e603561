"""Probes of GPUs through NVML, and what XIDs mean."""
