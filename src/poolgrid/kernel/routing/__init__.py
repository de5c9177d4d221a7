"""The pure heart of the router: prefix index, load ledger, cost, policies, decisions. No sockets, clocks or tasks."""
