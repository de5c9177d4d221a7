"""The judgement: evidence in, findings out. No sockets and no clocks, so that a recorded check is judged again."""
