"""What a rank tells other systems while it works: metrics for Prometheus, runs for MLflow and Weights & Biases.

Start at ``exporter.py``, which the runner opens and closes. ``metrics.py`` has the metrics and their values, which
``prometheus.py`` shows; ``tracking.py`` keeps ``datatrove-ckpt track`` at work.
"""
