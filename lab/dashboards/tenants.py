"""Who uses the fleet, and who is refused."""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, Threshold, rate, share
from lab.dashboards.selectors import NAMESPACE, NAMESPACES, TENANTS

KEYS = "API keys"
CHOSEN = f'{NAMESPACE}, tenant=~"$tenant"'

ALL_OUTPUT = rate(f"poolgrid_frontend_tenant_output_tokens_total{{{NAMESPACE}}}")


def _of(name: str, by: tuple[str, ...] = ("tenant",)) -> str:
    return rate(f"poolgrid_frontend_tenant_{name}_total{{{CHOSEN}}}", by)


TENANTS_BOARD = Board(
    "poolgrid-tenants",
    "poolgrid: Tenants",
    "Requests, tokens and refusals by tenant. The first 200 tenants have their own series; later ones are `other`.",
    (NAMESPACES, TENANTS),
    (
        Row(
            "Use",
            (
                Panel(
                    "Requests",
                    "reqps",
                    (Query(_of("requests"), "{{tenant}}"),),
                    "Admitted requests, by tenant.",
                    "A tenant that grows unexpectedly: contact it, or set limits (`poolgrid keys`).",
                    "queue-filling",
                    width=12,
                    stacked=True,
                    needs=KEYS,
                ),
                Panel(
                    "Refusals by code",
                    "reqps",
                    (Query(_of("refusals", ("tenant", "code")), "{{tenant}}: {{code}}"),),
                    "Requests refused, by tenant and reason.",
                    "`rate_limited`: it exceeds its quota. `busy`: the fleet is full, and the fair queue evicted "
                    "its requests.",
                    "queue-filling",
                    width=12,
                    stacked=True,
                    needs=KEYS,
                    no_value="nobody was refused",
                ),
                Panel(
                    "Prompt tokens",
                    "short",
                    (Query(_of("prompt_tokens"), "{{tenant}}"),),
                    "Prompt tokens per second, by tenant, each prompt once.",
                    "The tenant's prefill load, before reuse.",
                    "queue-filling",
                    width=12,
                    stacked=True,
                    needs=KEYS,
                ),
                Panel(
                    "Output tokens",
                    "short",
                    (Query(_of("output_tokens"), "{{tenant}}"),),
                    "Output tokens per second, by tenant.",
                    "The tenant's decode load.",
                    "queue-filling",
                    width=12,
                    stacked=True,
                    needs=KEYS,
                ),
            ),
        ),
        Row(
            "Shares",
            (
                Panel(
                    "Share of output tokens",
                    "percentunit",
                    (
                        Query(
                            f"{_of('output_tokens')} / scalar({ALL_OUTPUT} > 0)",
                            "{{tenant}}",
                        ),
                    ),
                    "Share of generated tokens, by tenant.",
                    "Weights (`poolgrid keys`) divide full queues; without a queue no tenant is delayed.",
                    "queue-filling",
                    kind="bargauge",
                    width=12,
                    maximum=1,
                    needs=KEYS,
                ),
                Panel(
                    "Share of requests refused",
                    "percentunit",
                    (
                        Query(
                            share(_of("refusals"), f"({_of('requests')} + {_of('refusals')})"),
                            "{{tenant}}",
                        ),
                    ),
                    "Refused requests, as a share of the tenant's requests.",
                    "Above 5 % for long: its limits, or the fleet, are too small.",
                    "queue-filling",
                    kind="bargauge",
                    width=12,
                    maximum=1,
                    needs=KEYS,
                    no_value="nobody was refused",
                    thresholds=(Threshold(0.05, "orange"), Threshold(0.2, "red")),
                ),
                Panel(
                    "State of the key file",
                    "short",
                    (Query(f"max(poolgrid_frontend_api_keys_stale{{{NAMESPACE}}})", "key file"),),
                    "1 while the file of API keys is invalid and an older one is in force.",
                    "The log has the place in the file. Until it is fixed, new keys do not work and removed ones do.",
                    "key-file-stale",
                    kind="stat",
                    width=6,
                    mappings=(("0", "in force", "green"), ("1", "stale", "red")),
                    no_value="no front end is scraped",
                ),
                Panel(
                    "Requests refused before any endpoint",
                    "reqps",
                    (Query(rate(f"poolgrid_http_refused_total{{{NAMESPACE}}}", ["reason"]), "{{reason}}"),),
                    "Connections and requests refused by the HTTP servers.",
                    "If it grows, there is an attack, or a limit is too small.",
                    "error-objective",
                    width=9,
                    no_value="none was refused",
                ),
                Panel(
                    "Peers refused by CURVE",
                    "short",
                    (
                        Query(
                            rate(f"poolgrid_plane_refused_peers_total{{{NAMESPACE}}}", ["plane", "reason"]),
                            "{{plane}}: {{reason}}",
                        ),
                    ),
                    "Peers whose key is not allowed, or whose handshake failed, per second.",
                    "A steady rate is a misconfigured worker or router; the log has its address.",
                    "stream-broken",
                    width=9,
                    no_value="none was kept out",
                    needs="CURVE",
                ),
            ),
        ),
    ),
)
