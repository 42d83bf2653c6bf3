"""Shows a rank's metrics to Prometheus while it works.

Start at ``exporter.py``, which the runner opens and closes; ``prometheus.py`` has the metrics.
"""
