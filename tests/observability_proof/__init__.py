"""A live fleet with Prometheus and Alertmanager: every panel shows something, every alert fires in a drill."""
