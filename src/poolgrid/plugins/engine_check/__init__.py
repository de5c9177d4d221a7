"""`poolgrid engine-check`: an engine server's KV events, compared with the blocks that its tokens imply."""
