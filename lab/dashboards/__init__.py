"""Grafana's dashboards as code: ``python -m lab.dashboards`` writes ``deploy/grafana/dashboards``.

Rules
    1. A panel names metrics and labels that the code defines, or that ``foreign.py`` lists of engines; else nothing is
       written (``checking.py``).
    2. A panel has a unit, a description that says what it means and what to do, and a link to its runbook.
    3. Quantiles and means are of rates over ``$__rate_interval``, never over the life of a process.
    4. A share of nothing is no number: its query returns nothing then, and the panel says ``no traffic``.
"""
