"""Service discovery: the addresses of a deployment's processes, each valid while the process renews it."""
