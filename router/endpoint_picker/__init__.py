"""Which pod of a pool gets a request that a gateway forwards: Envoy asks over ext-proc, and is told."""
