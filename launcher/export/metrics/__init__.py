"""Metrics for Prometheus, of a job and of a cluster, and their server."""
