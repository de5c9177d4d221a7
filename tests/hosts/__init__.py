"""Three hosts on one machine, as network namespaces: a whole deployment whose hosts are cut off and killed in turn."""
