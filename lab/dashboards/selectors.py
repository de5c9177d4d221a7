"""Which series a board's queries read: by what is chosen at its head."""

from __future__ import annotations

from lab.dashboards.model import Variable

NAMESPACE = 'namespace=~"$namespace"'
POOL = f'{NAMESPACE}, pool=~"$pool"'
WORKER = f'{POOL}, worker=~"$worker"'
MODEL = f'{NAMESPACE}, model=~"$model"'

NAMESPACES = Variable("namespace", "Namespace", "label_values(poolgrid_build_info, namespace)")
POOLS = Variable("pool", "Pool", f"label_values(poolgrid_router_workers{{{NAMESPACE}}}, pool)")
MODELS = Variable("model", "Model", f"label_values(poolgrid_frontend_target_judgements_total{{{NAMESPACE}}}, model)")
ROLES = Variable("role", "Role", f"label_values(poolgrid_worker_info{{{POOL}}}, role)")
WORKERS = Variable("worker", "Worker", f'label_values(poolgrid_worker_info{{{POOL}, role=~"$role"}}, worker)')
GLOBAL_POOLS = Variable("pool", "Pool", f"label_values(poolgrid_global_router_pools{{{NAMESPACE}}}, pool)")
TENANTS = Variable("tenant", "Tenant", f"label_values(poolgrid_frontend_tenant_requests_total{{{NAMESPACE}}}, tenant)")


def by_worker(expr: str) -> str:
    """Return a query of a worker's own series with the names of worker, role and model, of those that are chosen."""
    info = f'poolgrid_worker_info{{{WORKER}, role=~"$role"}}'
    return f"({expr}) * on (instance) group_left (worker, role, model) {info}"
