"""The model of an upload or a query, read without reading files."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.multipart import (
    MAX_PART_HEAD_BYTES,
    MAX_PARTS,
    MAX_QUERY_FIELDS,
    MAX_VALUE_BYTES,
    FormFields,
    boundary_of,
    model_of_query,
)

BOUNDARY = b"fwdBOUNDARYx7"
Part = tuple[bytes, bytes | None, bytes]


def form(parts: list[Part], end: bytes = b"--\r\n") -> bytes:
    body = b""
    for name, filename, value in parts:
        body += b'--%b\r\nContent-Disposition: form-data; name="%b"' % (BOUNDARY, name)
        body += b"" if filename is None else b'; filename="%b"\r\nContent-Type: audio/mpeg' % filename
        body += b"\r\n\r\n" + value + b"\r\n"
    return body + b"--" + BOUNDARY + end


def read(body: bytes, size: int = 0) -> FormFields:
    fields = FormFields(BOUNDARY)
    for at in range(0, len(body), size or len(body) or 1):
        fields.feed(body[at : at + (size or len(body))])
    return fields


SOUND = bytes((i * 7 + i // 256) % 256 for i in range(40_000)) + b"\r\n--fwd" + b"\r\n--" + BOUNDARY + b"x"

FORMS = [
    pytest.param(form([(b"model", None, b"m")]), {"model": "m"}, id="one"),
    pytest.param(
        form(
            [
                (b"file", b"a.mp3", SOUND),
                (b"model", None, b"org/m"),
                (b"language", None, b"de"),
                (b"stream", None, b"true"),
            ]
        ),
        {"model": "org/m", "stream": "true"},
        id="behind-a-file",
    ),
    pytest.param(form([(b"model", None, b"a"), (b"model", None, b"b")]), {"model": "b"}, id="repeated"),
    pytest.param(form([(b"model", b"x", b"a"), (b"response_format", None, b"")]), {"response_format": ""}, id="a-file"),
    pytest.param(form([(b"file", b'x; name=\\"model\\"', b"a")]), {}, id="name-within-a-filename"),
    pytest.param(form([(b"mod%65l", None, b"a"), (b"Model", None, b"b")]), {}, id="other-names"),
    pytest.param(form([(b"model", None, "Größe".encode())]), {"model": "Größe"}, id="utf-8"),
    pytest.param(form([(b"model", None, b"a\r\nb")]), {"model": "a\r\nb"}, id="lines"),
    pytest.param(form([]), {}, id="no-part"),
    pytest.param(b"preamble\r\n" + form([(b"model", None, b"m")]) + b"epilogue", {"model": "m"}, id="around-it"),
    pytest.param(
        form([(b"model", None, b"m")]).replace(b"\r\nContent-D", b" \t\r\ncontent-type: text/plain\r\ncONTENT-d"),
        {"model": "m"},
        id="spelling",
    ),
    pytest.param(
        b"--%b\r\ncontent-disposition:form-data;name=model\r\n\r\nm\r\n--%b--" % (BOUNDARY, BOUNDARY),
        {"model": "m"},
        id="bare",
    ),
    pytest.param(
        b'--%b\r\nx-note: content-disposition: form-data; name="model"\r\n\r\nm\r\n--%b--' % (BOUNDARY, BOUNDARY),
        {},
        id="another-line",
    ),
    pytest.param(b"--%b\r\n\r\nm\r\n--%b--" % (BOUNDARY, BOUNDARY), {}, id="no-header-line"),
]


@pytest.mark.parametrize("size", [0, 1, 3, 1000])
@pytest.mark.parametrize(("body", "values"), FORMS)
def test_the_fields_of_a_form_are_read(body: bytes, values: dict[str, str], size: int) -> None:
    fields = read(body, size)

    assert fields.values == values
    assert fields.is_done


def test_a_field_is_there_before_the_form_ends() -> None:
    body = form([(b"model", None, b"m"), (b"file", b"x", b"sound")])
    fields = read(body[: body.index(b"filename")])

    assert fields.values == {"model": "m"}
    assert not fields.is_done


def test_a_cut_form_has_no_half_of_a_field() -> None:
    body = form([(b"model", None, b"model-1")])

    for end in range(body.index(b"--" + BOUNDARY, 10) + len(BOUNDARY) + 2):
        assert read(body[:end]).values == {}


@pytest.mark.parametrize("size", [4096, 0])
def test_a_field_behind_a_file_of_any_size_is_read(size: int) -> None:
    fields = read(form([(b"file", b"a", b"x" * (4 << 20)), (b"model", None, b"m")]), size)

    assert fields.values == {"model": "m"}
    assert fields.has_end


@pytest.mark.parametrize(
    ("body", "has_end"),
    [
        (form([(b"model", None, b"m")]), True),
        (form([(b"a", None, b"")] * (MAX_PARTS - 1)), True),
        (form([(b"a", None, b"")] * (MAX_PARTS + 1)), False),
        (form([(b"model", None, b"m")], end=b""), False),
        (form([(b"model", None, b"m")], end=b"-"), False),
        (b"", False),
        (b"model=m", False),
    ],
)
def test_a_form_has_an_end_only_where_all_fields_before_it_were_read(body: bytes, has_end: bool) -> None:
    assert read(body).has_end is has_end
    assert read(body, 7).has_end is has_end


NO_DELIMITERS = {
    "boundaries with a letter behind": b"\r\n--" + BOUNDARY + b"x",
    "boundaries with blanks and a letter behind": b"\r\n--" + BOUNDARY + b"  x",
    "beginnings of boundaries": b"\r\n--" + BOUNDARY[:-1],
    "line ends": b"\r\n",
}


@pytest.mark.parametrize("piece", NO_DELIMITERS.values(), ids=NO_DELIMITERS.keys())
@pytest.mark.parametrize("size", [0, 65_536])
def test_a_file_full_of_almost_delimiters_costs_no_more_than_a_search(piece: bytes, size: int) -> None:
    """A copy of the rest for each of them took a minute for these 4 MB."""
    body = form([(b"file", b"a", piece * ((4 << 20) // len(piece))), (b"model", None, b"m")])
    began = time.process_time()

    assert read(body, size).values == {"model": "m"}

    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("length", "values"), [(MAX_VALUE_BYTES, {"model": "m" * MAX_VALUE_BYTES}), (MAX_VALUE_BYTES + 1, {})]
)
@pytest.mark.parametrize("size", [0, 100])
def test_a_long_value_is_not_kept(length: int, values: dict[str, str], size: int) -> None:
    assert read(form([(b"model", None, b"m" * length)]), size).values == values


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(form([(b"a", None, b"")] * (MAX_PARTS + 1), end=b""), id="parts"),
        pytest.param(b"--" + BOUNDARY + b"\r\nx: " + b"y" * (2 * MAX_PART_HEAD_BYTES), id="header-lines"),
        pytest.param(b"--" + BOUNDARY + b" " * (2 * MAX_PART_HEAD_BYTES), id="space-behind-a-boundary"),
    ],
)
def test_a_form_beyond_a_bound_is_not_read_on(body: bytes) -> None:
    fields = read(body, 512)
    assert fields.is_done

    fields.feed(b"\r\n\r\n\r\n" + form([(b"model", None, b"m")]))
    assert fields.values == {}


def test_a_long_value_costs_no_memory() -> None:
    fields = FormFields(BOUNDARY)
    fields.feed(form([(b"model", None, b"")], end=b"")[: -len(BOUNDARY) - 4])
    for _ in range(50):
        fields.feed(b"m" * 1000)

    assert len(fields._rest) <= MAX_VALUE_BYTES + 1000


def test_a_file_costs_a_search_and_no_memory() -> None:
    fields = FormFields(BOUNDARY)
    fields.feed(form([(b"file", b"a", b"")], end=b"")[: -len(BOUNDARY) - 4])
    piece = b"\r\n-" * 10_000
    began = time.perf_counter()
    for _ in range(30):
        fields.feed(piece)

    assert len(fields._rest) <= len(BOUNDARY) + 4
    assert time.perf_counter() - began < 0.2


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from([b"model", b"stream", b"file", b"prompt"]),
            st.sampled_from([None, None, b"f"]),
            st.sampled_from(
                [b"", b"m", b"--", b"\r\n", b"--" + BOUNDARY, b"\r\n--" + BOUNDARY + b"x", b"\r", b"long" * 300]
            ),
        ),
        max_size=5,
    ),
    cuts=st.lists(st.integers(0, 3000), max_size=10),
)
def test_fields_equal_the_naive_reading_however_the_body_is_split(parts: list[Part], cuts: list[int]) -> None:
    body = form(parts)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    fields = FormFields(BOUNDARY)
    for start, end in pairwise(places):
        fields.feed(body[start:end])
    naive = {
        name.decode(): value.decode()
        for name, filename, value in parts
        if filename is None and name in (b"model", b"stream") and len(value) <= MAX_VALUE_BYTES
    }

    assert fields.is_done
    assert fields.values == naive


@given(
    st.lists(
        st.sampled_from(
            [b"--" + BOUNDARY, b"\r\n", b"--", b'content-disposition: form-data; name="model"', b"m", b";", b'"']
        )
    )
)
def test_any_bytes_are_read_without_an_error(pieces: list[bytes]) -> None:
    fields = FormFields(BOUNDARY)
    for piece in pieces:
        fields.feed(piece)

    assert set(fields.values) <= {"model"}


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; BOUNDARY="a b:c"', b"a b:c"),
        (b"multipart/form-data;boundary=a'b; x=y", b"a'b"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
        (b"multipart/form-data; boundary=" + b"x" * 71, b"x" * 70),
        (b"multipart/form-data2; boundary=abc", None),
        (b"application/json; x=multipart/form-data; boundary=abc", None),
        (b"", None),
    ],
)
def test_the_boundary_of_a_content_type(content_type: bytes, boundary: bytes | None) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    ("query", "model"),
    [
        (b"model=m", "m"),
        (b"a=1&model=org%2Fm+x&b", "org/m x"),
        (b"model=a&model=b", "b"),
        (b"model=", ""),
        (b"", None),
        (b"models=m&xmodel=y", None),
        (b"m%6fdel=m", "m"),
        (b"&".join([b"a=1"] * (MAX_QUERY_FIELDS + 1)) + b"&model=m", None),
    ],
)
def test_the_model_of_a_query(query: bytes, model: str | None) -> None:
    assert model_of_query(query) == model
