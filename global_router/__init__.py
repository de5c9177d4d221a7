"""The global router: which pool serves a request, chosen from a grid of what the request needs."""
