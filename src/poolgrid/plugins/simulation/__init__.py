"""`poolgrid simulate`: router core, policies and simulated engines in virtual time, no sockets."""
