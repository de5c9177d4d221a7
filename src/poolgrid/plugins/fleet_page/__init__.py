"""The fleet page: what a browser shows at ``/ui``, and the streams behind it. The same of both routers."""
