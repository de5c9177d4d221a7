"""Logits processors that requests attach by name: the protocol, the ones that come with poolgrid, the registry."""
