"""Chooses the pod of a pool for each request that a gateway forwards: Envoy asks over ext-proc."""
