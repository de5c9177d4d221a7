"""Lists of engine servers: entries, files, names of workers, and what several lists want together."""

from __future__ import annotations

import pytest

from poolgrid.server.workers.engines.server.core.server_list import (
    ABSENCES_MAX,
    SERVERS_MAX,
    Addresses,
    DnsName,
    PodSelector,
    ServerEntry,
    ServerLists,
    read_entry,
    read_file,
    url_of,
)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://gpu1:8000", ServerEntry("http://gpu1:8000")),
        ("http://GPU1:8000/v1/", ServerEntry("http://gpu1:8000")),
        ("https://gpu1/models", ServerEntry("https://gpu1/models")),
        ("prefill=http://gpu1:8000", ServerEntry("http://gpu1:8000", "prefill")),
        ("http://[fd00::1]:8000", ServerEntry("http://[fd00::1]:8000")),
        ("dns+http://vllm.llm.svc:8000", DnsName("vllm.llm.svc", 8000, "aggregated")),
        ("decode=dns+http://vllm:8000", DnsName("vllm", 8000, "decode")),
        ("k8s+http://:8000?selector=app%3Dvllm", PodSelector("app=vllm", 8000, "", "aggregated")),
        (
            "k8s+http://:80?selector=a%3Db,c%20in%20(d)&namespace=llm",
            PodSelector("a=b,c in (d)", 80, "llm", "aggregated"),
        ),
    ],
)
def test_an_entry_is_a_server_a_name_or_labels(given: str, found: object) -> None:
    assert read_entry(given) == found


@pytest.mark.parametrize(
    "given",
    [
        "gpu1:8000",
        "http://",
        "http://gpu1:99999",
        "http://gpu1:8000?model=a",
        "http://user:secret@gpu1",
        "http://gpu 1",
        "http://gpu1\n",
        "prefill=",
        "prefill",
        "encode=http://gpu1:8000",
        "dns+http://name",
        "dns+https://name:1",
        "dns+http://name:1/path",
        "k8s+http://:8000",
        "k8s+http://pod:8000?selector=a",
        "k8s+http://:8000?selector=a&other=b",
        "k8s+http://:8000?selector=a%0ab",
        "k8s+http://:8000?selector=a&namespace=../b",
        "http://" + "a" * 3000,
        "http://gpu1:8000/" + "a" * 300,
        "http://gpu1:0",
        "http://gpu1:8000/\u00fc",
        "http://gpu<1:8000",
        "http://:secret@gpu1:8000",
    ],
)
def test_what_is_no_entry_is_refused_with_what_is_allowed(given: str) -> None:
    with pytest.raises(ValueError, match=r"allowed (is|are)") as refused:
        read_entry(given)
    assert "secret" not in str(refused.value)


def test_a_file_has_an_entry_a_line_and_comments() -> None:
    text = "# all of them\n\nhttp://a:1   # first\n  prefill=http://b:1\r\n"
    assert read_file(text) == (ServerEntry("http://a:1"), ServerEntry("http://b:1", "prefill"))
    assert read_file("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://a:1\nnonsense", "line 2: 'nonsense' is no"),
        ("http://a:1\n\nhttp://a:1/v1", "line 3: http://a:1 is there twice"),
        ("dns+http://a:1", "line 1: .* stands for several servers"),
        ("\n".join(f"http://a:{port}" for port in range(1, SERVERS_MAX + 2)), f"{SERVERS_MAX + 1} servers"),
    ],
)
def test_a_broken_file_names_its_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_file(text)


def test_the_name_of_a_worker_comes_from_its_address_alone_and_differs_from_all_others() -> None:
    urls = [
        "http://gpu1:8000",
        "http://gpu1:8001",
        "http://gpu1",
        "https://gpu1",
        "http://gpu1:8000/a",
        "http://gpu1:8000/b",
        "http://gpu1-8000:8000",
        "http://[fd00::1]:8000",
        "http://[fd00::2]:8000",
        "http://[fd00:1::]:8000",
    ]
    names = [ServerEntry(url).worker_id for url in urls]
    assert names[0] == ServerEntry(urls[0], "prefill").worker_id == "gpu1-8000"
    assert names[2:4] == ["gpu1-80", "gpu1-443"]
    assert len(set(names)) == len(urls)
    assert all(name and all(each.isalnum() or each in ".-" for each in name) for name in names)


def test_a_server_of_several_lists_stays_until_the_last_has_it_no_more() -> None:
    lists = ServerLists()
    a, b = ServerEntry("http://a:1"), ServerEntry("http://b:1")
    assert lists.put("given", [a])
    assert lists.put("file", [a, b])
    assert not lists.put("file", [a, b])
    assert set(lists.wanted) == {"a-1", "b-1"}
    assert lists.put("given", [])
    assert set(lists.wanted) == {"a-1", "b-1"}
    assert lists.list_of("a-1") == "file"
    lists.put("file", [b])
    assert (set(lists.wanted), lists.list_of("a-1")) == ({"b-1"}, "")


def test_beyond_the_bound_those_that_are_followed_stay_and_one_that_goes_makes_room() -> None:
    lists = ServerLists()
    first = [ServerEntry(f"http://a:{port}") for port in range(1, SERVERS_MAX)]
    lists.put("file", first)
    lists.put("given", [ServerEntry("http://b:1"), ServerEntry("http://b:2")])
    assert (len(lists.wanted), lists.left_out, "b-1" in lists.wanted) == (SERVERS_MAX, 1, True)
    lists.put("file", [ServerEntry("http://c:1"), *first])
    assert ("c-1" in lists.wanted, "b-1" in lists.wanted, lists.left_out) == (False, True, 2)
    lists.put("file", first[2:])
    assert ("b-2" in lists.wanted, lists.left_out) == (True, 0)


def test_another_role_of_a_server_is_another_entry() -> None:
    lists = ServerLists()
    lists.put("file", [ServerEntry("http://a:1")])
    assert lists.put("file", [ServerEntry("http://a:1", "prefill")])
    assert lists.wanted["a-1"].role == "prefill"


def test_an_address_leaves_a_name_only_after_several_looks_without_it() -> None:
    addresses = Addresses()
    assert addresses.seen(["10.0.0.2", "10.0.0.1"]) == ("10.0.0.1", "10.0.0.2")
    for _ in range(ABSENCES_MAX - 1):
        assert addresses.seen(["10.0.0.1"]) == ("10.0.0.1", "10.0.0.2")
    assert addresses.seen(["10.0.0.1"]) == ("10.0.0.1",)
    assert addresses.seen(["10.0.0.2"]) == ("10.0.0.1", "10.0.0.2"), "it was missing once"


def test_an_address_becomes_a_url() -> None:
    assert url_of("10.0.0.1", 8000) == "http://10.0.0.1:8000"
    assert url_of("fd00::1", 8000) == "http://[fd00::1]:8000"
