"""What a rank tells other systems while it works: metrics for Prometheus, runs for MLflow and Weights & Biases.

Start at ``exporter.py``, which the runner opens and closes. ``prometheus.py`` has the metrics and shows them;
``exporter.py`` keeps ``datatrove-ckpt track`` at work.
"""
