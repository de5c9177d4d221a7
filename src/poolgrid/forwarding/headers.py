HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"}
OWN = {b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"}


def _named(headers):
    return {t.strip().lower() for n, v in headers if n == b"connection" for t in v.split(b",")}


def request_headers(headers):
    out = HOP | OWN | _named(headers)
    return [p for p in headers if p[0] not in out]


def answer_headers(headers, secret):
    out = HOP | _named(headers)
    return [p for p in headers if p[0] not in out and not (secret and secret in p[1])]


def upgrade_headers(headers):
    return [p for p in headers if p[0] not in OWN]
