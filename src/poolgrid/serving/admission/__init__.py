"""Who waits, in what order, who gives way, when to come back: the pure part of admission that both routers share."""
