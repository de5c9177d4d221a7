"""`poolgrid doctor`: why workers reuse more or less than the router promised."""
