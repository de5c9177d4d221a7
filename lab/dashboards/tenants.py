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
    "Requests, tokens and refusals by tenant. The first 200 tenants have series of their own, later ones are `other`.",
    (NAMESPACES, TENANTS),
    (
        Row(
            "Use",
            (
                Panel(
                    "Requests",
                    "reqps",
                    (Query(_of("requests"), "{{tenant}}"),),
                    "Requests let in, by tenant.",
                    "A tenant that grows without notice: talk to it, or set its limits (`poolgrid keys`).",
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
                    "`rate_limited`: it wants more than its limits allow. `busy`: the fleet is full, and fairness "
                    "chose it.",
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
                    "What a tenant costs in prefill, before reuse.",
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
                    "What a tenant costs in decode.",
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
                    "Whose answers the fleet generates.",
                    "Weights (`poolgrid keys`) say how full queues are shared; without a queue nobody is held back.",
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
                    "Of what a tenant asked for, how much was refused.",
                    "Above 5 % for long: its limits, or the fleet, are too small for what it does.",
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
                    "1 while the file of API keys cannot be used and an older one is in force.",
                    "The log names the place in the file. Until it is mended, new keys do not work and old ones do.",
                    "key-file-stale",
                    kind="stat",
                    width=6,
                    mappings=(("0", "in force", "green"), ("1", "stale", "red")),
                    no_value="no front end is scraped",
                ),
                Panel(
                    "Requests kept out before any endpoint",
                    "reqps",
                    (Query(rate(f"poolgrid_http_refused_total{{{NAMESPACE}}}", ["reason"]), "{{reason}}"),),
                    "Connections and requests that the HTTP servers refused unread.",
                    "If it grows, somebody attacks, or a limit is too small for honest clients.",
                    "error-objective",
                    width=9,
                    no_value="none was refused",
                ),
                Panel(
                    "Peers kept out by CURVE",
                    "short",
                    (
                        Query(
                            rate(f"poolgrid_plane_refused_peers_total{{{NAMESPACE}}}", ["plane", "reason"]),
                            "{{plane}}: {{reason}}",
                        ),
                    ),
                    "Peers whose key is not allowed, or whose handshake failed, per second.",
                    "A steady rate is one misconfigured worker or router: the log names its address.",
                    "stream-broken",
                    width=9,
                    no_value="none was kept out",
                    needs="CURVE",
                ),
            ),
        ),
    ),
)
