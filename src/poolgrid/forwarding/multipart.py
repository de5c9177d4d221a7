import re
from urllib.parse import parse_qs


def model_of_query(query):
    return parse_qs(query.decode("latin-1")).get("model", [""])[0]


def model_of_form(body, content_type):
    found = re.search(rb'name="model"\r\n\r\n([^\r]*)', body[:1 << 20])
    return found[1].decode() if found else ""
