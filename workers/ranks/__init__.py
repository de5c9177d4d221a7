"""Engines that span processes and nodes: a keeper beside every rank, and the leader's watch over them."""
