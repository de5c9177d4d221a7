"""Service discovery from Kubernetes: EndpointSlices, which are only read."""
