"""Names instead of addresses: who of a deployment listens where, for as long as it says so."""
