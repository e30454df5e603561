"""Metrics for Prometheus: what there is (``definitions``), and the samples of it that values give (``samples``).

Pure: values in, samples out. ``launcher.metrics_server`` serves them.
"""
