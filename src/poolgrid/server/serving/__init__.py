"""What both routers need to talk to workers: one connection per worker process, one stream per request."""
