"""What a rank tells other systems while it works: metrics for Prometheus.

Start at ``exporter.py``, which the runner opens and closes. ``prometheus.py`` has the metrics and
shows them.
"""
