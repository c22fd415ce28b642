"""Rows that name what they should not, or media that would exhaust memory, time or disk. All traffic stays on this machine."""

from __future__ import annotations

import base64
import gzip
import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import httpcore
import numpy as np
import pytest
import soundfile
from PIL import Image, ImageFile

from lightrft.config.data import MediaConfig
from lightrft.datasets.media import audio
from lightrft.datasets.media.access import Access
from lightrft.datasets.media.audio import AudioSettings, read_sound, sound_length
from lightrft.datasets.media.fetch import Fetch, Frames, Samples
from lightrft.datasets.media.image import read_picture
from lightrft.datasets.media.items import Item
from lightrft.datasets.media.reader import MediaReader
from lightrft.datasets.media.video import VideoSettings, clip_extent, read_clip
from lightrft.datasets.row_tables import MalformedRow
from lightrft.types import Extent
from tests.unit.datasets.media_files import clip, encoded, picture, pixels

LIMIT = 64_000_000
MB = 2**20
VIEW = VideoSettings(
    fps=None, max_frames=64, max_seconds=None, max_source_pixels=LIMIT, most_bytes=2048 * MB
)
HEAR = AudioSettings(rate=16000, resample=True, max_seconds=None, most_bytes=2048 * MB)


def peak_mb(work: Callable[[], Any]) -> float:
    """The most memory in MiB that numpy and Python hold while ``work`` runs; an expected ``ValueError`` is dropped."""
    tracemalloc.start()
    try:
        work()
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / MB


def wav(rate: int, samples: int = 20, claimed: int | None = None) -> bytes:
    data = b"\1\2" * samples
    size = len(data) if claimed is None else claimed
    head = b"RIFF" + struct.pack("<I", min(36 + size, 2**32 - 1)) + b"WAVEfmt "
    return (
        head
        + struct.pack("<IHHIIHH", 16, 1, 1, rate, min(rate * 2, 2**32 - 1), 2, 16)
        + b"data"
        + struct.pack("<I", size)
        + data
    )


# Sound.


@pytest.mark.parametrize("rate", [1, 7, 44_099, 767_999, 999_983, 4_294_967_291])
def test_a_short_sound_of_an_odd_rate_takes_little_memory_and_time(
    rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters, coefficients = audio._filters, []

    def counted(*phases: Any) -> Any:
        coefficients.append((found := filters(*phases)).size)
        return found

    audio._whole_bank.cache_clear()
    monkeypatch.setattr(audio, "_filters", counted)
    assert peak_mb(lambda: read_sound(wav(rate), HEAR)) < 64
    assert sum(coefficients) < 2**20  # 2 to 48 millions where all of a rate are computed


def test_a_sound_whose_header_claims_more_than_there_is_takes_what_there_is() -> None:
    assert peak_mb(lambda: read_sound(wav(16000, claimed=2**32 - 40), HEAR)) < 16


def test_a_flac_whose_header_claims_hours_is_refused_by_its_header_and_takes_no_memory_for_them() -> (
    None
):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16000, np.float32), 16000, format="FLAC")
    data = bytearray(file.getvalue())
    data[21] |= 0x0F  # the 36 bits of the count of samples in STREAMINFO
    data[22:26] = b"\xff" * 4
    with pytest.raises(ValueError, match=r"data\.media\.max_decoded_mb = 2048"):
        sound_length(bytes(data), HEAR)
    assert peak_mb(lambda: read_sound(bytes(data), HEAR)) < 16


@pytest.mark.parametrize("form", ["OGG", "FLAC", "MP3", "WAV"])
def test_a_sound_longer_than_max_seconds_is_not_decoded_to_its_end(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16000 * 120, np.float32), 16000, format=form)
    read, decoded = soundfile.SoundFile.read, []

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        decoded.append(read(self, *args, **options))
        return decoded[-1]

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    hearing = AudioSettings(16000, True, 2.0)
    for work in (sound_length, read_sound):
        decoded.clear()
        with pytest.raises(ValueError, match=r"more than data\.media\.max_seconds = 2"):
            work(file.getvalue(), hearing)
        assert sum(map(len, decoded)) < 16000 * 20


def test_a_sound_beyond_max_decoded_mb_is_refused_in_any_form() -> None:
    small = AudioSettings(16000, True, None, most_bytes=MB)
    for content in (
        wav(16000, 100_000),
        Samples(np.zeros(100_000, np.float32), 16000),
        wav(8, 200),
    ):
        with pytest.raises(ValueError, match=r"more than data\.media\.max_decoded_mb = 1$"):
            read_sound(content, small)


# Pictures and clips.


def black_png(side: int) -> bytes:
    """A PNG by its header alone: to decode it would fail."""
    whole = encoded(np.zeros((4, 4, 3), np.uint8))
    header = whole[12:16] + struct.pack(">II", side, side) + whole[24:29]
    return whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]


def gif(side: int, frames: int = 2, grown: int = 0) -> bytes:
    """A GIF whose screen is ``side`` wide, and whose last frame reaches beyond it where ``grown``."""
    file = io.BytesIO()
    pictures = [Image.new("P", (8, 8), k) for k in range(frames)]
    for k, one in enumerate(pictures):
        one.putpalette([k, k, k] * 256)
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=100)
    data = bytearray(file.getvalue())
    data[6:10] = struct.pack("<HH", side, side)
    if grown:
        last = data.rfind(b"\x2c\x00\x00\x00\x00")
        data[last + 5 : last + 9] = struct.pack("<HH", grown, grown)
    return bytes(data)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any decoding of a picture fails the test."""

    def load(self: Any) -> None:
        raise AssertionError(f"{self.size} was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.usefixtures("no_decoding")
def test_frames_that_are_too_large_together_are_refused_by_their_headers() -> None:
    content = Frames(tuple([black_png(7680)] * 64))
    for work in (clip_extent, read_clip):
        with pytest.raises(
            ValueError,
            match=r"64 frames of 7680 x 7680 pixels take 10\.5 GiB, more than data\.media\.max_decoded_mb",
        ):
            work(content, VIEW)


@pytest.mark.usefixtures("no_decoding")
def test_frames_of_different_sizes_are_refused_by_their_headers() -> None:
    content = Frames((black_png(8), black_png(7680)))
    with pytest.raises(ValueError, match="frames of different sizes: 7680 x 7680, 8 x 8"):
        read_clip(content, VIEW)


@pytest.mark.usefixtures("no_decoding")
def test_an_animation_is_refused_by_its_header_before_a_frame_is_decoded() -> None:
    with pytest.raises(
        ValueError, match=r"9000 x 9000 pixels, more than data\.media\.max_source_pixels"
    ):
        read_clip(gif(9000), VIEW)
    few = VideoSettings(None, 1, None, LIMIT, most_bytes=10 * MB)
    with pytest.raises(
        ValueError,
        match=r"9 frames of 2000 x 2000 pixels take .* more than 8 times data\.media\.max_decoded_mb = 10",
    ):
        clip_extent(gif(2000, frames=9), few)


def test_an_animation_that_grows_is_refused_before_the_large_frame_is_decoded() -> None:
    assert read_clip(gif(8, frames=3), VIEW)[0].shape == (3, 8, 8, 3)
    for side, problem in (
        (9000, "9000 x 9000 pixels, more than"),
        (60_000, "damaged at frame 3: Image size .* exceeds limit"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_clip(gif(8, frames=3, grown=side), VIEW)


def test_a_video_is_refused_by_its_header_before_a_frame_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip(tmp_path / "a.mp4")
    monkeypatch.setattr(
        "lightrft.datasets.media.video._upright", lambda frame: pytest.fail("a frame was decoded")
    )
    with pytest.raises(
        ValueError, match=r"48 x 32 pixels, more than data\.media\.max_source_pixels = 1000"
    ):
        clip_extent(tmp_path / "a.mp4", VideoSettings(None, 64, None, 1000))


def test_the_frames_of_a_video_are_bounded_together(tmp_path: Path) -> None:
    clip(tmp_path / "a.mp4")
    with pytest.raises(
        ValueError,
        match=r"12 frames of 48 x 32 pixels take 54\.0 KiB, more than data\.media\.max_decoded_mb",
    ):
        read_clip(tmp_path / "a.mp4", VideoSettings(None, 64, None, LIMIT, most_bytes=50_000))


def test_a_play_list_is_no_video_and_opens_nothing(tmp_path: Path) -> None:
    clip(tmp_path / "secret.ts")
    for name, text in {
        "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.5,\nsecret.ts\n#EXT-X-ENDLIST\n",
        "b.txt": f"ffconcat version 1.0\nfile '{tmp_path / 'secret.ts'}'\n",
    }.items():
        (tmp_path / name).write_text(text)
        for content in (tmp_path / name, text.encode()):
            with pytest.raises(ValueError, match="not a video of any known format"):
                read_clip(content, VIEW)


def test_a_page_description_is_no_picture() -> None:
    with pytest.raises(ValueError, match="not a picture of any known format"):
        read_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", LIMIT)


# Bytes of a value, and of a row.


def test_values_beyond_max_file_mb_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    fetch = Fetch(tmp_path, 1.0, largest=MB)
    text = base64.b64encode(bytes(2 * MB)).decode()
    (tmp_path / "a.bin").write_bytes(bytes(2 * MB))
    for value in (
        bytes(2 * MB),
        {"bytes": bytes(2 * MB)},
        text,
        f"data:image/png;base64,{text}",
        {"base64": text},
        "data:," + text,
        "a.bin",
    ):
        assert peak_mb(lambda value=value: fetch.content(value, tmp_path)) < 8
        with pytest.raises(ValueError, match=r"more than data\.media\.max_file_mb = 1"):
            fetch.content(value, tmp_path)


def test_a_deeply_nested_value_is_a_malformed_row(tmp_path: Path) -> None:
    value: Any = "a.png"
    for _ in range(100_000):
        value = {"path": value}
    reader = MediaReader(
        MediaConfig(), SimpleNamespace(limited=lambda *_: SimpleNamespace(parts={}))
    )
    with pytest.raises(MalformedRow, match="RecursionError"):
        reader.measure(Item("image", value, "row 1", tmp_path))
    # To end it level by level: the interpreter would end it by recursion.
    while isinstance(value, dict):
        value = value.popitem()[1]


def test_the_items_of_a_row_are_bounded_together(tmp_path: Path) -> None:
    reader = MediaReader(
        MediaConfig(max_row_mb=1), SimpleNamespace(limited=lambda *_: SimpleNamespace(parts={}))
    )
    items = [Item(kind, "a", "row 1", tmp_path) for kind in ("image", "audio")]
    extents = [Extent((500, 500, 3)), Extent((20_000,))]
    reader.check_total(items, extents, "row 1")
    with pytest.raises(
        MalformedRow,
        match=r"row 1: its 2 pictures, videos and sounds take 1\.1 MiB .* data\.media\.max_row_mb = 1",
    ):
        reader.check_total(items, [extents[0], Extent((30_000,))], "row 1")


# Who may be asked.


class Trap(BaseHTTPRequestHandler):
    """``/headers`` never ends its headers, ``/bomb`` is 100 MiB of zeros in 100 KiB, ``/zipped`` a picture in gzip, ``/away`` leads to
    the same server by another name, ``/round`` to itself."""

    asked: ClassVar[list[str]] = []
    over: ClassVar[Event] = Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.over.wait(0.02):
                try:
                    self.wfile.write(b"a: b\r\n")
                except OSError:
                    return
        zeros = {"/bomb": bytes(100 * MB), "/zipped": encoded(pixels(5, 7))}
        away = {
            "/away": f"http://127.0.0.1:{self.server.server_port}/zipped",
            "/round": "/round",
            "/file": "file:///etc/hosts",
        }
        if self.path in away:
            self.send_response(302)
            self.send_header("Location", away[self.path])
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Encoding", "br" if self.path == "/br" else "gzip")
        self.end_headers()
        try:
            self.wfile.write(gzip.compress(zeros.get(self.path, b""), 6))
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "*")
    Trap.asked.clear()
    Trap.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Trap) as server:
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Trap.over.set()
        server.shutdown()


HERE = Access(hosts=("127.0.0.1",))


def test_headers_that_never_end_are_late(tmp_path: Path, trap: str) -> None:
    # the headers go on until the test is over
    with pytest.raises(ValueError, match=r"within data\.media\.timeout = 0\.5 s"):
        Fetch(tmp_path, 0.5, access=HERE).content(f"{trap}/headers", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_compressed_body_is_bounded_by_what_it_becomes(tmp_path: Path, trap: str) -> None:
    fetch = Fetch(tmp_path, 300.0, largest=4 * MB, access=HERE)
    assert peak_mb(lambda: fetch.content(f"{trap}/bomb", tmp_path)) < 210, (
        "100 MiB of them, twice, are the server's own"
    )
    with pytest.raises(ValueError, match="more than the 4194304 bytes"):
        fetch.content(f"{trap}/bomb", tmp_path)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(
        read_picture(fetch.content(f"{trap}/zipped", tmp_path), LIMIT), pixels(5, 7)
    )
    with pytest.raises(ValueError, match="content encoding 'br'"):
        fetch.content(f"{trap}/br", tmp_path)


def test_a_private_address_is_refused_unless_it_is_listed_and_so_is_each_redirect(
    tmp_path: Path, trap: str
) -> None:
    for host in (
        trap,
        trap.replace("127.0.0.1", "localhost"),
        trap.replace("127.0.0.1", "2130706433"),
        trap.replace("//", "//a:b@"),
    ):
        with pytest.raises(
            ValueError,
            match=r"has the private address .*; add the host to data\.media\.allow\.hosts",
        ) as refused:
            Fetch(tmp_path, 300.0).content(f"{host}/zipped", tmp_path)
        assert "a:b@" not in str(refused.value)
    assert Trap.asked == []
    named = trap.replace("127.0.0.1", "localhost")
    for path, problem in {
        "away": "127.0.0.1 is not in data",
        "round": "redirected more than 10",
        "file": "only http and https",
    }.items():
        with pytest.raises(ValueError, match=problem):
            Fetch(tmp_path, 300.0, access=Access(hosts=("localhost",))).content(
                f"{named}/{path}", tmp_path
            )
    assert "/zipped" not in Trap.asked
    for listed in (("localhost", "127.0.0.1"), ("127.0.0.0/8",), ("local*", "127.*")):
        found = Fetch(tmp_path / listed[0][:4], 300.0, access=Access(hosts=listed)).content(
            f"{named}/away", tmp_path
        )
        assert isinstance(found, Path) and found.is_file()


def test_the_address_that_was_checked_is_the_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    answers = iter(["93.184.215.14", "127.0.0.1"])
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (next(answers), 80))])
    asked: list[str] = []

    def connect(self: Any, host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        raise httpcore.ConnectError("not in a test")

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(ValueError, match="ConnectError"):
        Fetch(tmp_path, 300.0).content("http://rebinds.test/a.png", tmp_path)
    assert asked == ["93.184.215.14"]


PRIVATE = [
    *(
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ),
    *(
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "::",
        "[::1]",
    ),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_every_kind_of_private_address_is_refused_by_default(host: str) -> None:
    with pytest.raises(ValueError, match="private address"):
        Access().check_host(host)


def test_hosts_are_matched_by_name_pattern_and_network() -> None:
    Access().check_host("8.8.8.8")
    Access(hosts=("10.0.0.0/8",)).check_host("10.1.2.3")
    Access(hosts=("*.example.org",)).check_host("a.EXAMPLE.org.")
    for hosts, host in (
        (("*.example.org",), "example.org.evil.test"),
        (("10.0.0.0/8",), "8.8.8.8"),
        ((), "8.8.8.8"),
        ((), "a.test"),
    ):
        with pytest.raises(ValueError, match=r"is not in data\.media\.allow\.hosts"):
            Access(hosts=hosts).check_host(host)


def test_only_files_below_the_allowed_folders_are_read_also_through_links(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        picture(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "folder").symlink_to(outside)
    fetch = Fetch(tmp_path, 1.0, access=Access(roots=(str(inside),)))
    assert fetch.content("a.png", inside) == (inside / "a.png").resolve()
    bad = [
        "../out/a.png",
        "link.png",
        "folder/a.png",
        str(outside / "a.png"),
        (outside / "a.png").as_uri(),
        outside / "a.png",
        "/etc/hosts",
    ]
    for value in bad:
        with pytest.raises(
            ValueError, match=r"is in none of the folders of data\.media\.allow\.roots"
        ):
            fetch.content(value, inside)
