"""URLs that a client should not get away with: each is refused with its own code, and no socket stays behind."""

from __future__ import annotations

import asyncio

import pytest

from poolgrid.kernel.wire.multimodal import digest_media
from poolgrid.server.frontend.media.addresses import AddressPolicy
from poolgrid.server.frontend.media.references import PIECE_CHARS, decode_data_url
from tests.frontend.media.hostile_server import answer, hostile_server
from tests.frontend.media.loading import Names, loading
from tests.frontend.media.samples import data_url, image, png, png_bomb

PICTURE = png()
MEGABYTE = 1024 * 1024


async def until_closed(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Say nothing until the client has closed its connection."""
    await reader.read()


async def test_a_picture_is_fetched_from_the_address_that_its_name_resolved_to_under_its_own_name() -> None:
    names = Names()
    async with hostile_server() as server, loading(names) as media:
        server.plays["/cat.png"] = answer(PICTURE, content_type="text/html")
        (item,) = await media.take(server.url("/cat.png?size=large"))

        assert (item.kind, item.data, item.media_type) == ("image", PICTURE, "image/png")
        assert item.media_hash == digest_media(PICTURE)
        assert server.asked == [("/cat.png?size=large", f"media.test:{server.port}")]
        assert names.asked == ["media.test"]


async def test_a_name_that_resolves_to_a_private_address_is_refused_before_anything_is_connected() -> None:
    names = Names(inside_test=["127.0.0.2"], both_test=["127.0.0.1,10.0.0.7"])
    async with hostile_server("127.0.0.2") as inside, loading(names) as media:
        for host in ("inside.test", "127.0.0.2", "both.test"):
            error = await media.refused(inside.url("/secret.png", host))

            assert (error.status, error.code) == (403, "media_address_not_allowed")
            assert error.param == "messages[0].content[0].image_url.url"
        assert inside.connections == 0


async def test_a_name_that_changes_its_address_after_the_check_gains_nothing() -> None:
    """DNS rebinding: the second answer would be private, and is never asked for."""

    names = Names(rebind_test=["127.0.0.1", "127.0.0.2"])
    async with hostile_server("127.0.0.1") as outside, hostile_server("127.0.0.2", outside.port) as inside:
        outside.plays["/cat.png"] = answer(PICTURE)
        inside.plays["/cat.png"] = answer(png(color=(0, 0, 0)))
        async with loading(names) as media:
            (item,) = await media.take(outside.url("/cat.png", "rebind.test"))

        assert item.data == PICTURE
        assert names.asked == ["rebind.test"]
        assert inside.connections == 0


@pytest.mark.parametrize(
    ("location", "status", "code"),
    [
        ("http://127.0.0.2:{port}/secret.png", 403, "media_address_not_allowed"),
        ("http://169.254.169.254/latest/meta-data/", 403, "media_address_not_allowed"),
        ("http://inside.test/secret.png", 403, "media_address_not_allowed"),
        ("http://[::ffff:10.0.0.1]/x.png", 403, "media_address_not_allowed"),
        ("file:///etc/passwd", 400, "media_redirect_refused"),
        ("gopher://media.test/x", 403, "media_scheme_not_allowed"),
        ("http://user:secret@media.test/x.png", 400, "media_reference_invalid"),
        ("", 400, "media_redirect_refused"),
        ("/again", 400, "media_redirect_refused"),
    ],
)
async def test_every_hop_of_a_redirect_is_checked(location: str, status: int, code: str) -> None:
    names = Names(inside_test=["192.168.0.9"])
    async with (
        hostile_server("127.0.0.1") as outside,
        hostile_server("127.0.0.2", outside.port) as inside,
        loading(names) as media,
    ):
        target = location.format(port=inside.port)
        outside.plays["/start"] = answer(status="302 Found", location=target)
        outside.plays["/again"] = answer(status="307 Temporary Redirect", location="/again")
        error = await media.refused(outside.url("/start"))

        assert (error.status, error.code) == (status, code), error.message
        assert inside.connections == 0


async def test_an_allowed_redirect_is_followed() -> None:
    async with hostile_server() as server, loading() as media:
        server.plays["/start"] = answer(status="301 Moved Permanently", location="cat.png#top")
        server.plays["/cat.png"] = answer(PICTURE)
        (item,) = await media.take(server.url("/start"))

        assert item.data == PICTURE


@pytest.mark.parametrize("length", [None, -1, 10 * MEGABYTE], ids=["without", "true", "lying"])
async def test_too_large_a_body_is_cut_off_whatever_its_length_claims(length: int | None) -> None:
    async with hostile_server() as server, loading(max_file_size_mb=1) as media:
        body = bytes(MEGABYTE + 1)
        server.plays["/big.png"] = answer(body, length=length)
        error = await media.refused(server.url("/big.png"))

        assert (error.status, error.code) == (413, "media_too_large")


async def test_an_endless_body_without_a_length_is_cut_off() -> None:
    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(length=None))
        while True:
            writer.write(bytes(65_536))
            await writer.drain()

    async with hostile_server() as server, loading(max_file_size_mb=1) as media:
        server.plays["/endless.png"] = endless
        error = await media.refused(server.url("/endless.png"))

        assert error.code == "media_too_large"


async def test_a_body_that_ends_before_its_length_is_a_failure_of_the_server() -> None:
    async with hostile_server() as server, loading() as media:
        server.plays["/short.png"] = answer(PICTURE, length=len(PICTURE) + 1)
        error = await media.refused(server.url("/short.png"))

        assert (error.status, error.code) == (502, "media_fetch_failed")


async def test_a_server_that_drips_is_cut_off_by_the_whole_time_and_its_connection_is_closed() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(PICTURE[:1], length=len(PICTURE) * 1000))
        # Always another byte before any time-out of a single read; ends when the client closes.
        while not reader.at_eof():
            writer.write(b"\0")
            try:
                await asyncio.wait_for(reader.read(1), 0.02)
            except TimeoutError:
                pass

    async with hostile_server() as server, loading(fetch_timeout_ms=150) as media:
        server.plays["/drip.png"] = drip
        error = await media.refused(server.url("/drip.png"))

        assert (error.status, error.code) == (504, "media_fetch_timeout")


async def test_a_server_that_says_nothing_and_a_port_where_nobody_listens_are_the_remotes_fault() -> None:
    async with loading(fetch_timeout_ms=100) as media:
        async with hostile_server() as server:
            server.plays["/silent.png"] = until_closed
            error = await media.refused(server.url("/silent.png"))
            assert (error.status, error.code) == (504, "media_fetch_timeout")
        error = await media.refused(server.url("/closed.png"))
        assert (error.status, error.code) == (502, "media_fetch_failed")


@pytest.mark.parametrize(
    ("response", "status", "code"),
    [
        (answer(b"no", status="404 Not Found"), 400, "media_not_found"),
        (answer(b"no", status="403 Forbidden"), 400, "media_not_found"),
        (answer(b"oops", status="500 Internal Server Error"), 502, "media_fetch_failed"),
        (answer(b"", status="204 No Content"), 502, "media_fetch_failed"),
        (answer(PICTURE, content_encoding="gzip"), 502, "media_fetch_failed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", 502, "media_fetch_failed"),
        (answer(b"<html>hello</html>", content_type="image/png"), 400, "media_type_not_allowed"),
        (answer(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), 400, "media_type_not_allowed"),
        (answer(image("BMP")), 400, "media_type_not_allowed"),
        (answer(image("ICO")), 400, "media_type_not_allowed"),
        (answer(b""), 400, "media_broken"),
        (answer(PICTURE[:60]), 400, "media_broken"),
        (answer(png_bomb()), 400, "media_too_many_pixels"),
        (answer(png_bomb(8000, 8000)), 400, "media_too_many_pixels"),
    ],
)
async def test_what_a_server_sends_instead_of_a_picture_is_refused(response: bytes, status: int, code: str) -> None:
    async with hostile_server() as server, loading() as media:
        server.plays["/x.png"] = response
        error = await media.refused(server.url("/x.png"))

        assert (error.status, error.code) == (status, code), error.message


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", "media_reference_invalid"),
        ("http://", "media_reference_invalid"),
        ("http://[::1", "media_reference_invalid"),
        ("http://media.test/" + "a" * 9000, "media_reference_invalid"),
        ("http://media.test/a\r\nX-Injected: 1", "media_reference_invalid"),
        ("http://user:secret@media.test/x.png", "media_reference_invalid"),
        ("http://nowhere.test/x.png", "media_host_unknown"),
        ("ftp://media.test/x.png", "media_scheme_not_allowed"),
        ("cat.png", "media_scheme_not_allowed"),
        ("http://127.0.0.1:1@10.0.0.1/x.png", "media_reference_invalid"),
        ("http://169.254.169.254/latest/meta-data/", "media_address_not_allowed"),
        ("http://[fd00:ec2::254]/", "media_address_not_allowed"),
        ("http://0.0.0.0/", "media_address_not_allowed"),
    ],
)
async def test_urls_that_are_none_or_lead_inside_are_refused(url: str, code: str) -> None:
    async with loading() as media:
        error = await media.refused(url)

        assert error.code == code, error.message
        assert "secret" not in error.message


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,!!!!", "media_encoding_invalid"),
        ("data:image/png;base64,QUJD=QUJD", "media_encoding_invalid"),
        ("data:image/png;base64,QUJ", "media_encoding_invalid"),
        ("data:image/png;base64," + "A" * (PIECE_CHARS - 2) + "==" + "A" * 8, "media_encoding_invalid"),
        ("data:image/png;base64," + "A" * (PIECE_CHARS + 3), "media_encoding_invalid"),
        ("data:image/png;base64," + "A" * PIECE_CHARS + "A\nAA", "media_encoding_invalid"),
        ("data:image/png;base64," + "A" * (PIECE_CHARS + 2) + "==", "media_type_not_allowed"),
        ("data:image/png;base64,Q\u00fcJD", "media_encoding_invalid"),
        ("data:image/png,%89PNG", "media_encoding_invalid"),
        ("data:image/png;base64", "media_encoding_invalid"),
        ("data:;base64,", "media_broken"),
        (data_url(b"GIF89a nonsense"), "media_broken"),
        (data_url(b"%PDF-1.7", "image/png"), "media_type_not_allowed"),
        (data_url(png_bomb()), "media_too_many_pixels"),
        (data_url(bytes(MEGABYTE + 1)), "media_too_large"),
    ],
)
async def test_data_urls_that_hold_no_picture_are_refused(url: str, code: str) -> None:
    async with loading(max_file_size_mb=1) as media:
        error = await media.refused(url)

        assert error.code == code, error.message
        assert len(error.message) < 500


@pytest.mark.parametrize("size", [PIECE_CHARS // 4 * 3 + extra for extra in (-1, 0, 1, 2, 3)])
def test_a_data_url_of_several_pieces_is_decoded_to_the_byte(size: int) -> None:
    data = bytes(number % 251 for number in range(size))

    assert decode_data_url(data_url(data), MEGABYTE) == data


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_data_urls_are_taken_by_content_whatever_they_claim(form: str) -> None:
    async with loading() as media:
        (item,) = await media.take(data_url(image(form), "application/octet-stream"))

        assert item.media_type == f"image/{form.lower()}"


async def test_schemes_can_be_switched_off() -> None:
    async with loading(media_allowed_schemes=("https",)) as media:
        for url in (data_url(PICTURE), "http://media.test/x.png"):
            error = await media.refused(url)
            assert error.code == "media_scheme_not_allowed"


async def test_the_media_of_a_request_are_bounded_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loading(max_media_items=2) as media:
        error = await media.refused(*[data_url(PICTURE)] * 3)
        assert (error.code, error.param) == ("media_too_many", "messages[0].content[2].image_url.url")
    noise = png() + bytes(450_000)
    monkeypatch.setattr("poolgrid.server.frontend.media.loader.REQUEST_BYTES_MAX", 2**20)
    async with loading() as media:
        assert len(await media.take(data_url(noise), data_url(noise))) == 2
        error = await media.refused(*[data_url(noise)] * 3)
        assert (error.status, error.code) == (413, "media_too_large")
    monkeypatch.undo()
    async with loading(media_memory_bytes=2**20) as media:
        error = await media.refused(*[data_url(noise)] * 3)
        assert (error.status, error.code) == (429, "media_busy")
        assert dict(error.headers)[b"retry-after"] == b"1"


async def test_one_bad_medium_ends_the_fetches_of_the_others() -> None:
    async with hostile_server() as server, loading(fetch_timeout_ms=60_000) as media:
        server.plays["/silent.png"] = until_closed
        error = await media.refused(server.url("/silent.png"), data_url(b"no picture"))

        assert error.param == "messages[0].content[1].image_url.url"


async def test_a_client_that_leaves_ends_its_fetch_but_not_that_of_others_who_wait_for_the_same_url() -> None:
    # Leaving the block waits until the server has seen its connection closed.

    asked, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await go_on.wait()
        writer.write(answer(PICTURE))
        await writer.drain()

    async with hostile_server() as server, loading(fetch_timeout_ms=60_000) as media:
        server.plays["/slow.png"] = wait
        first, second = (asyncio.ensure_future(media.take(server.url("/slow.png"))) for _ in range(2))
        await asked.wait()
        first.cancel()
        await asyncio.wait([first])
        go_on.set()

        assert (await second)[0].data == PICTURE
        assert (await media.take(server.url("/slow.png")))[0].data == PICTURE
        assert server.connections == 1
        for outcome in ("miss", "shared", "hit"):
            labels = {"outcome": outcome}
            name = "poolgrid_frontend_media_cache_lookups_total"
            assert media.metrics.registry.get_sample_value(name, labels) == 1

        asked.clear()

        async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()

        server.plays["/silent.png"] = silent
        alone = asyncio.ensure_future(media.take(server.url("/silent.png")))
        await asked.wait()
        alone.cancel()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::127.0.0.1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:7f00:0001::", "loopback"),
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", "private"),
        ("169.254.169.254", "metadata"),
        ("169.254.1.1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("168.63.129.16", "metadata"),
        ("100.64.0.1", "private"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("fd12::1", "private"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("0.0.0.0", "unspecified"),
        ("255.255.255.255", "private"),
        ("not an address", "not an IP address"),
    ],
)
def test_addresses_that_are_not_public_are_refused_however_they_are_written(address: str, words: str) -> None:
    refusal = AddressPolicy().refusal(address)

    assert refusal is not None
    assert words in refusal
