"""What is served to Prometheus, and from where: the metrics of a job, of a cluster, and their server."""
