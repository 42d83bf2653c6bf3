"""What a rank tells other systems while it works: metrics for Prometheus, runs for MLflow and Weights & Biases.

Start at ``exporter.py``, which the runner opens and closes. ``metrics.py`` has the metrics and their values; with
``prometheus.py`` they become text, which ``metrics_port.py`` serves and ``metrics_file.py`` writes.
"""
