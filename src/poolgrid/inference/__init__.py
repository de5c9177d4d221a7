"""What an inference request is and what answers it: values and ports that HTTP, serving and routers share."""
