"""Fields of bodies of which no words say what is allowed there."""

from __future__ import annotations

from msgspec import inspect as kinds

from poolgrid.server.frontend.field_words import words_at


def fields_without_words(body: type) -> list[str]:
    """Return the paths of a body, and of the objects in it, of which no words say what is allowed there."""
    found: list[str] = []
    seen: set[type] = set()

    def walk(kind: kinds.Type, path: str) -> None:
        match kind:
            case kinds.Metadata(type=inner):
                walk(inner, path)
            case kinds.UnionType(types=types):
                for each in types:
                    walk(each, path)
            case kinds.ListType(item_type=item):
                walk(item, f"{path}[0]")
            case kinds.StructType(cls=cls, fields=fields) if cls not in seen:
                seen.add(cls)
                for field in fields:
                    inner_path = f"{path}.{field.encode_name}".lstrip(".")
                    if words_at(body, inner_path) is None:
                        found.append(inner_path)
                    walk(field.type, inner_path)

    walk(kinds.type_info(body), "")
    return found
