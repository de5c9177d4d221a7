"""`poolgrid engine-check`: what an engine server's KV events say, compared with what its tokens imply."""
