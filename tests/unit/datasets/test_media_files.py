"""Pictures, sounds and clips of many formats to arrays, against arrays that were written."""

from __future__ import annotations

import base64
import contextlib
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightrft.datasets.media.access import Access
from lightrft.datasets.media.audio import AudioSettings, read_sound, resampled, sound_length
from lightrft.datasets.media.fetch import Fetch, Frames, Samples, digest
from lightrft.datasets.media.image import attachment, picture_size, read_picture
from lightrft.datasets.media.video import VideoSettings, clip_extent, read_clip
from lightrft.types import Extent
from lightrft.utils.errors import DataError
from tests.unit.datasets.media_files import clip, encoded, picture, pixels, sound, tone

LIMIT = 10**8
VIEW = VideoSettings(fps=2.0, max_frames=8, max_seconds=None, max_source_pixels=LIMIT)
HERE = Access(hosts=("127.0.0.1",))
HEAR = AudioSettings(rate=16000, resample=True, max_seconds=None)


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    return Fetch(tmp_path / "downloads", 300.0, access=HERE)


# What a value stands for.


def test_every_way_to_name_a_picture_gives_the_same_pixels(tmp_path: Path, fetch: Fetch) -> None:
    array = picture(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    text = base64.b64encode(data).decode()
    ways: list[Any] = [
        "a.png",
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        (tmp_path / "a.png").as_uri(),
        data,
        bytearray(data),
        text,
        f"data:image/png;base64,{text}",
        {"bytes": data, "path": "elsewhere.png"},
        {"bytes": None, "path": "a.png"},
        {"url": (tmp_path / "a.png").as_uri()},
        {"image": "a.png"},
        {"data": text, "format": "png"},
        {"base64": text},
        Image.open(tmp_path / "a.png"),
        array,
        array.tolist(),
    ]
    for way in ways:
        content = fetch.content(way, tmp_path)
        np.testing.assert_array_equal(read_picture(content, LIMIT), array)
        assert picture_size(content, LIMIT) == array.shape


class Site(BaseHTTPRequestHandler):
    """``/a.png`` is a picture, ``/drip`` comes byte by byte without end, ``/long`` has 100000 bytes,
    ``/page`` says that it is sorry."""

    asked: ClassVar[list[str]] = []
    over: ClassVar[Event] = Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        pages = {
            "/a.png": encoded(pixels(5, 7)),
            "/long": b"x" * 100_000,
            "/page": b"\n <html>Sorry",
            "/nothing": b"",
        }
        name = self.path.partition("?")[0]
        self.send_response(200 if name in pages or name == "/drip" else 404)
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked has left
            self.wfile.write(pages.get(name, b""))
            while name == "/drip" and not self.over.wait(0.02):
                self.wfile.write(b"x")

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this machine."""
    monkeypatch.setenv("NO_PROXY", "*")
    Site.asked.clear()
    Site.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Site.over.set()
        server.shutdown()


def test_a_url_is_downloaded_once_and_taken_from_the_folder_afterwards(
    tmp_path: Path, fetch: Fetch, site: str
) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(
            read_picture(fetch.content(f"{site}/a.png?size=1", tmp_path), LIMIT), pixels(5, 7)
        )
    assert Site.asked == ["/a.png?size=1"]
    with pytest.raises(
        ValueError, match=r"has not been downloaded to .*downloads, and data\.media\.offline is set"
    ):
        Fetch(fetch.folder, 300.0, offline=True, access=HERE).content(f"{site}/c.png", tmp_path)


def test_a_download_that_fails_or_is_late_or_too_large_or_no_media_leaves_nothing_behind(
    tmp_path: Path, site: str
) -> None:
    cases = [
        ("b.png", 300.0, "b.png cannot be downloaded: the server answers with status 404"),
        ("drip", 0.2, r"drip cannot be downloaded within data\.media\.timeout = 0\.2 s"),
        ("long", 300.0, "long cannot be downloaded: it has more than the 50000 bytes"),
        ("page", 300.0, "page cannot be downloaded: what comes is a page of text"),
        ("nothing", 300.0, "nothing cannot be downloaded: what comes is empty"),
    ]
    for name, timeout, problem in cases:
        with pytest.raises(ValueError, match=f"{site}/{problem}"):
            Fetch(tmp_path / "downloads", timeout, largest=50_000, access=HERE).content(
                f"{site}/{name}", tmp_path
            )
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("gone.png", r"there is no file .*gone\.png"),
        ("s3://bucket/a.png", "only http, https and file"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,!!", "not base64"),
        ("x" * 5000 + "!", "neither a path nor base64"),
        ("a\0b", "there is no file"),
        (b"", "there are no bytes"),
        ([], "the list is empty"),
        ({}, "it has: nothing"),
        ({"name": "x"}, "it has: name"),
        (3, "a int is neither a path"),
    ],
)
def test_what_names_nothing_is_told_why(
    value: Any, problem: str, tmp_path: Path, fetch: Fetch
) -> None:
    with pytest.raises(ValueError, match=problem):
        fetch.content(value, tmp_path)


def test_an_empty_file_is_told(tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png is empty"):
        fetch.content("a.png", tmp_path)


def test_a_hash_is_of_the_content_wherever_it_is_kept(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert digest(tmp_path / "a.png") == digest(data)
    assert digest(data) != digest(data + b" ")
    values = tone(0.1, 8000)
    assert digest(Samples(values, 8000)) != digest(Samples(values, 16000))
    assert digest(pixels(4, 6)) != digest(pixels(6, 4))
    assert digest(Frames((data, b"x"))) != digest(Frames((data,)))


def test_a_hash_tells_pictures_with_other_palettes_or_transparency_apart(tmp_path: Path) -> None:
    red, blue, clear, half = (Image.new("P", (8, 8)) for _ in range(4))
    for made, colour in (
        (red, [255, 0, 0]),
        (blue, [0, 0, 255]),
        (clear, [255, 0, 0]),
        (half, [255, 0, 0]),
    ):
        made.putpalette(colour)
    clear.info["transparency"] = 0
    half.info["transparency"] = b"\x80"
    alpha = Image.new("P", (8, 8))
    alpha.putpalette([255, 0, 0, 9], "RGBA")
    assert len({digest(one) for one in (red, blue, clear, half, alpha)}) == 5
    assert digest(red) == digest(red.copy())
    for name, colour in (("red.gif", red), ("blue.gif", blue)):
        colour.save(tmp_path / name)
    assert digest(Image.open(tmp_path / "red.gif")) != digest(Image.open(tmp_path / "blue.gif"))


# Pictures.


def test_a_picture_is_turned_upright_as_its_camera_says(tmp_path: Path) -> None:
    array = pixels(12, 20)
    for orientation, turned in (
        (1, array),
        (3, array[::-1, ::-1]),
        (6, np.rot90(array, -1)),
        (8, np.rot90(array)),
    ):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for name in ("a.png", "a.tiff", "a.webp"):
            Image.fromarray(array).save(tmp_path / name, exif=exif, lossless=True)
            np.testing.assert_array_equal(read_picture(tmp_path / name, LIMIT), turned)
            assert picture_size(tmp_path / name, LIMIT) == turned.shape
        np.testing.assert_array_equal(read_picture(Image.open(tmp_path / "a.webp"), LIMIT), turned)


def test_transparent_places_are_white(tmp_path: Path) -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (200, 10, 20, 255)
    rgba[0, 1] = (0, 0, 0, 128)
    expected = np.array([[[200, 10, 20], [127, 127, 127]], [[255] * 3, [255] * 3]], np.uint8)
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    np.testing.assert_array_equal(read_picture(tmp_path / "rgba.png", LIMIT), expected)
    np.testing.assert_array_equal(read_picture(rgba, LIMIT), expected)
    palette = Image.fromarray(np.array([[0, 1]], np.uint8))
    palette.putpalette([9, 8, 7, 1, 2, 3])
    palette.save(tmp_path / "palette.png", transparency=1)
    np.testing.assert_array_equal(
        read_picture(tmp_path / "palette.png", LIMIT), [[[9, 8, 7], [255, 255, 255]]]
    )


def test_grey_and_deep_pictures_keep_their_brightness(tmp_path: Path) -> None:
    grey = np.array([[0, 100, 255]], np.uint8)
    Image.fromarray(grey).save(tmp_path / "l.png")
    Image.fromarray((grey.astype(np.uint16) << 8) + 7).save(tmp_path / "i16.png")
    Image.fromarray(grey > 50).save(tmp_path / "bit.png")
    expected = np.repeat(grey[..., None], 3, axis=-1)
    for name in ("l.png", "i16.png"):
        np.testing.assert_array_equal(read_picture(tmp_path / name, LIMIT), expected)
    np.testing.assert_array_equal(read_picture(tmp_path / "bit.png", LIMIT)[0, :, 0], [0, 255, 255])
    for array in (grey, grey[..., None], grey / 255.0, grey.astype(np.int64)):
        np.testing.assert_array_equal(read_picture(array, LIMIT), expected)
    np.testing.assert_array_equal(
        read_picture(np.moveaxis(pixels(6, 9), -1, 0), LIMIT), pixels(6, 9)
    )


def test_of_an_animation_the_first_picture_is_taken(tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((4, 4, 3), v, np.uint8)) for v in (40, 200))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    np.testing.assert_array_equal(read_picture(tmp_path / "a.gif", LIMIT), np.full((4, 4, 3), 40))


def test_a_damaged_or_monstrous_picture_is_told(tmp_path: Path) -> None:
    data = encoded(pixels(200, 300))
    assert picture_size(data[: len(data) // 2], LIMIT) == (200, 300, 3)
    cases: list[tuple[Any, int, str]] = [
        (data[: len(data) // 2], LIMIT, "the picture is damaged"),
        (b"not a picture at all", LIMIT, "not a picture of any known format"),
        (data, 1000, r"300 x 200 pixels, more than data\.media\.max_source_pixels = 1000"),
        (
            encoded(np.zeros((4000, 20000), bool)),
            64_000_000,
            r"20000 x 4000 pixels, more than data\.media\.max_source_pixels",
        ),
        (encoded(np.zeros((10000, 20000), bool)), LIMIT, "the picture is too large"),
        (np.zeros((2, 5, 7)), LIMIT, r"shape \(2, 5, 7\) is no picture"),
        (np.full((4, 5), 3.0), LIMIT, r"must lie in \[0, 1\]"),
        (np.full((4, 5), 300), LIMIT, "must be uint8"),
        (np.zeros((0, 5), np.uint8), LIMIT, "the picture is empty"),
        (Samples(tone(0.1, 8000), 8000), LIMIT, "Samples is no picture"),
    ]
    for content, limit, problem in cases:
        with pytest.raises(ValueError, match=problem):
            read_picture(content, limit)


def test_no_picture_needs_torchvision(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png", LIMIT).shape == (20, 30, 3)
    assert "torchvision" not in sys.modules


# Sound.


@pytest.mark.parametrize(
    ("name", "tolerance"), [("a.wav", 1e-4), ("a.flac", 1e-4), ("a.ogg", 0.05), ("a.mp3", 0.05)]
)
def test_sound_of_every_format_is_what_was_written(
    name: str, tolerance: float, tmp_path: Path
) -> None:
    values = sound(tmp_path / name, seconds=0.7)
    found = read_sound(tmp_path / name, HEAR)
    assert found.dtype == np.float32
    assert (
        len(found)
        == sound_length(tmp_path / name, HEAR)
        == sound_length((tmp_path / name).read_bytes(), HEAR)
    )
    assert abs(len(found) - len(values)) <= (0 if name != "a.mp3" else 4000)
    middle = slice(2000, 8000)
    assert np.abs(found[middle] - values[middle]).max() < tolerance


def test_channels_are_averaged_and_integers_scaled(tmp_path: Path) -> None:
    left, right = tone(0.2, 16000), np.zeros(3200, np.float32)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), 16000, subtype="FLOAT")
    np.testing.assert_allclose(read_sound(tmp_path / "a.wav", HEAR), left / 2, atol=1e-7)
    for values in (np.stack([left, right]), np.stack([left, right], 1)):
        np.testing.assert_allclose(read_sound(Samples(values, 16000), HEAR), left / 2, atol=1e-7)
    whole = np.array([-32768, 0, 16384], np.int16)
    np.testing.assert_array_equal(read_sound(Samples(whole, 16000), HEAR), [-1, 0, 0.5])


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(8000, 16000), (16000, 8000), (44100, 16000), (48000, 16000), (22050, 16000)],
)
def test_a_sine_stays_a_sine_at_another_rate(rate: int, wanted: int) -> None:
    hertz = 0.35 * min(rate, wanted) / 2
    found = resampled(tone(1.0, rate, hertz), rate, wanted)
    assert len(found) == math.ceil(rate * wanted / rate)
    inside = slice(200, -200)  # a filter has nothing to look at beyond the ends
    assert np.abs(found[inside] - tone(1.0, wanted, hertz)[inside]).max() < 1e-4


def test_what_a_lower_rate_cannot_hold_is_taken_away() -> None:
    found = resampled(tone(1.0, 16000, 6000.0), 16000, 8000)
    assert np.abs(found[200:-200]).max() < 1e-3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.sampled_from([8000, 11025, 16000, 22050, 44100]),
    st.sampled_from([8000, 16000, 24000]),
)
def test_resampling_is_the_sum_over_the_filter_wherever_a_sample_falls(
    length: int, rate: int, wanted: int
) -> None:
    values = np.random.default_rng(length).normal(size=length).astype(np.float32)
    found = resampled(values, rate, wanted)
    assert len(found) == -(-length * wanted // rate)
    if rate == wanted:
        np.testing.assert_array_equal(found, values)
        return
    cutoff = min(1.0, wanted / rate)
    reach = math.ceil(24 / cutoff)
    for out in (0, len(found) // 2, len(found) - 1):
        place = out * rate / wanted
        near = np.arange(math.floor(place + 1e-9) - reach, math.floor(place + 1e-9) + reach + 1)
        away = near - place
        window = np.i0(9.0 * np.sqrt(np.clip(1 - (away / (reach + 1)) ** 2, 0, None)))
        weights = np.sinc(cutoff * away) * window
        weights /= weights.sum()
        there = (near >= 0) & (near < length)
        assert abs(found[out] - (weights[there] * values[near[there]]).sum()) < 1e-4


def test_sound_that_does_not_fit_is_told(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav", seconds=0.5, rate=8000)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 16000)
    (tmp_path / "noise.wav").write_bytes(b"nothing of a kind" * 9)
    cases: list[tuple[Any, AudioSettings, str]] = [
        (
            tmp_path / "a.wav",
            AudioSettings(16000, False, None),
            r"8000 samples a second, the model takes 16000; set data\.media\.resample",
        ),
        (
            tmp_path / "a.wav",
            AudioSettings(16000, True, 0.3),
            r"lasts 0\.5 s, more than data\.media\.max_seconds = 0\.3",
        ),
        (tmp_path / "empty.wav", HEAR, "the sound is empty"),
        (tmp_path / "noise.wav", HEAR, "the sound cannot be read"),
        (Samples(np.array([0.0, np.nan]), 16000), HEAR, "not finite"),
        (Samples(np.zeros((2, 2, 2)), 16000), HEAR, "is no sound"),
        (Samples(np.zeros(3, np.int64), 16000), HEAR, "must be floating-point"),
        (Samples(np.zeros(3), 0), HEAR, "a rate of 0"),
        (np.zeros(100, np.float32), HEAR, "has no sampling rate; write"),
    ]
    for content, hearing, problem in cases:
        with pytest.raises(ValueError, match=problem):
            read_sound(content, hearing)


def test_the_sound_of_a_video_file_is_heard_as_loud_as_it_is(tmp_path: Path) -> None:
    import av

    def coded(name: str, layout: str, channels: np.ndarray) -> np.ndarray:
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("aac", rate=16000, layout=layout)
            frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
            frame.sample_rate = 16000
            for packet in (*stream.encode(frame), *stream.encode()):
                container.mux(packet)
        found = read_sound(tmp_path / name, HEAR)
        assert sound_length(tmp_path / name, HEAR) == len(found)
        return np.abs(np.fft.rfft(found[2000:10000])) / 4000

    values = tone(1.0, 16000)
    for name, layout, channels, loud in (
        ("mono.m4a", "mono", values[None], 0.5),
        ("stereo.m4a", "stereo", np.stack([values, values]), 0.5),
        ("left.m4a", "stereo", np.stack([values, np.zeros_like(values)]), 0.25),
    ):
        spectrum = coded(name, layout, channels)
        assert np.argmax(spectrum) == 440 * 8000 // 16000
        assert abs(spectrum.max() - loud) < 0.02


# Clips.


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_frames_are_taken_at_the_rate_that_is_set(name: str, tmp_path: Path) -> None:
    clip(tmp_path / name, frames=12, rate=8)
    for content in (tmp_path / name, (tmp_path / name).read_bytes()):
        frames, extent = read_clip(content, VIEW)
        assert extent.times == (0.0, 0.5, 1.0)
        assert extent.shape == frames.shape == (3, 32, 48, 3)
        assert np.abs(frames.mean(axis=(1, 2, 3)) - [0, 80, 160]).max() < 4
        assert clip_extent(content, VIEW) == extent


@pytest.mark.parametrize(
    ("hidden", "greys"),
    [
        ((4, 6), [0, 60, 160]),
        ((3, 4), [0, 40, 160]),
        ((0,), [20, 80, 160]),
        ((8, 9, 10, 11), [0, 80, 140]),
    ],
)
def test_where_a_packet_has_no_frame_that_is_seen_which_stands_at_the_time(
    hidden: tuple[int, ...], greys: list[int], tmp_path: Path
) -> None:
    clip(tmp_path / "a.webm", frames=12, rate=8, codec="libvpx", hidden=hidden)
    frames, extent = read_clip(tmp_path / "a.webm", VIEW)
    assert extent.times == (0.0, 0.5, 1.0) and clip_extent(tmp_path / "a.webm", VIEW) == extent
    assert np.abs(frames.mean(axis=(1, 2, 3)) - greys).max() < 6


def test_a_clip_of_which_less_than_half_can_be_decoded_is_damaged(tmp_path: Path) -> None:
    clip(tmp_path / "a.webm", frames=12, rate=8, codec="libvpx", hidden=range(1, 12))
    with pytest.raises(ValueError, match="the video is damaged: 2 of 3 frames cannot be decoded"):
        read_clip(tmp_path / "a.webm", VIEW)


def test_of_a_long_clip_frames_are_spread_over_its_length(tmp_path: Path) -> None:
    clip(tmp_path / "a.mp4", frames=12, rate=2)
    assert clip_extent(tmp_path / "a.mp4", VideoSettings(4.0, 4, None, LIMIT)).times == (
        0.0,
        1.5,
        3.5,
        5.5,
    )
    assert len(clip_extent(tmp_path / "a.mp4", VideoSettings(None, 100, None, LIMIT)).times) == 12
    assert len(clip_extent(tmp_path / "a.mp4", VideoSettings(100.0, 100, None, LIMIT)).times) == 12
    assert len(clip_extent(tmp_path / "a.mp4", VideoSettings(100.0, 1, None, LIMIT)).times) == 1
    few = VideoSettings(0.1, 8, None, LIMIT, least=3)
    assert clip_extent(tmp_path / "a.mp4", few).times == (0.0, 3.0, 5.5)
    clip(tmp_path / "b.mp4", frames=2, rate=30)
    assert len(clip_extent(tmp_path / "b.mp4", few).times) == 2


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_an_animation_is_a_clip_from_a_file_and_in_memory(name: str, tmp_path: Path) -> None:
    shades = [Image.fromarray(np.full((8, 12, 3), 40 * k, np.uint8)) for k in range(5)]
    shades[0].save(
        tmp_path / name, save_all=True, append_images=shades[1:], duration=250, lossless=True
    )
    with Image.open(tmp_path / name) as lent:
        for stands in (0, 3):
            lent.seek(stands)
            for content in (tmp_path / name, lent):
                frames, extent = read_clip(content, VIEW)
                assert (
                    extent == Extent((3, 8, 12, 3), (0.0, 0.5, 1.0)) == clip_extent(content, VIEW)
                )
                assert frames[:, 0, 0, 0].tolist() == [0, 80, 160]
            assert lent.tell() == stands and read_picture(lent, LIMIT)[0, 0, 0] == 40 * stands
    still = Image.fromarray(pixels(8, 12))
    np.testing.assert_array_equal(read_clip(still, VIEW)[0], pixels(8, 12)[None])


def test_an_animation_in_memory_is_read_by_several_threads_at_once(tmp_path: Path) -> None:
    shades = [Image.fromarray(np.full((8, 12, 3), 40 * k, np.uint8)) for k in range(5)]
    for name in ("a.gif", "a.png", "a.webp"):
        shades[0].save(
            tmp_path / name, save_all=True, append_images=shades[1:], duration=250, lossless=True
        )
        with Image.open(tmp_path / name) as lent, ThreadPoolExecutor(6) as threads:
            expected = digest(lent)
            clips = [threads.submit(read_clip, lent, VIEW) for _ in range(6)]
            firsts = [threads.submit(read_picture, lent, LIMIT) for _ in range(6)]
            hashes = [threads.submit(digest, lent) for _ in range(6)]
            assert all(one.result()[0][:, 0, 0, 0].tolist() == [0, 80, 160] for one in clips)
            assert all(one.result()[0, 0, 0] == 0 for one in firsts)
            assert all(one.result() == expected for one in hashes)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_a_hash_of_an_animation_in_memory_is_of_all_its_frames_and_their_times(
    name: str, tmp_path: Path
) -> None:
    def hashed(last: int, duration: int = 250, at: int = 0) -> bytes:
        shades = [Image.fromarray(np.full((8, 12, 3), shade, np.uint8)) for shade in (10, 90, last)]
        shades[0].save(
            tmp_path / name,
            save_all=True,
            append_images=shades[1:],
            duration=duration,
            lossless=True,
        )
        with Image.open(tmp_path / name) as lent:
            lent.seek(at)
            return digest(lent)

    assert hashed(200) == hashed(200)
    assert len({hashed(200), hashed(150), hashed(200, duration=500), hashed(200, at=1)}) == 4


def test_an_animation_in_memory_that_was_closed_is_still_a_picture_and_told_as_a_clip(
    tmp_path: Path,
) -> None:
    shades = [Image.fromarray(np.full((8, 12, 3), 40 * k, np.uint8)) for k in range(2)]
    shades[0].save(tmp_path / "a.gif", save_all=True, append_images=shades[1:], duration=250)
    with Image.open(tmp_path / "a.gif") as closed:
        closed.load()
    assert digest(closed) == digest(closed)
    assert read_picture(closed, LIMIT).shape == (8, 12, 3)
    with pytest.raises(ValueError, match="the animation cannot be read: Operation on closed image"):
        read_clip(closed, VIEW)


def test_pictures_in_a_row_and_arrays_are_clips(tmp_path: Path, fetch: Fetch) -> None:
    arrays = [picture(tmp_path / f"{k}.png", seed=k) for k in range(3)]
    named = fetch.content([f"{k}.png" for k in range(3)], tmp_path)
    for content in (named, np.stack(arrays)):
        frames, extent = read_clip(content, VIEW)
        np.testing.assert_array_equal(frames, np.stack(arrays))
        assert extent == Extent((3, 20, 30, 3), (0.0, 0.5, 1.0)) == clip_extent(content, VIEW)
    assert clip_extent(np.zeros((99, 4, 4, 3), np.uint8), VIEW).shape[0] == 8


def test_a_clip_that_cannot_be_seen_is_told(tmp_path: Path) -> None:
    clip(tmp_path / "a.mp4", frames=24, rate=8)
    data = (tmp_path / "a.mp4").read_bytes()
    sound(tmp_path / "a.wav")
    picture(tmp_path / "b.png", 8, 8)
    picture(tmp_path / "c.png", 8, 9)
    cases: list[tuple[Any, VideoSettings, str]] = [
        (b"\0\0 nothing of a kind" * 9, VIEW, "not a video of any known format"),
        (tmp_path / "a.wav", VIEW, "no video in the file"),
        (
            data,
            VideoSettings(2.0, 8, 1.0, LIMIT),
            r"lasts 2\.9 s, more than data\.media\.max_seconds = 1",
        ),
        (
            data,
            VideoSettings(2.0, 8, None, 100),
            r"48 x 32 pixels, more than data\.media\.max_source_pixels = 100",
        ),
        (
            Frames((tmp_path / "b.png", tmp_path / "c.png")),
            VIEW,
            "frames of different sizes: 8 x 8, 9 x 8",
        ),
        (Frames(()), VIEW, "no frames"),
        (np.zeros((3, 4)), VIEW, "is no video"),
    ]
    for content, viewing, problem in cases:
        with pytest.raises(ValueError, match=problem):
            read_clip(content, viewing)
        if "different" not in problem:
            with pytest.raises(ValueError, match=problem):
                clip_extent(content, viewing)


def test_a_library_that_is_not_installed_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound(tmp_path / "a.wav")
    clip(tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"needs soundfile: pip install -e '\.\[audio\]'"):
        read_sound(tmp_path / "a.wav", HEAR)
    with pytest.raises(DataError, match=r"needs av: pip install -e '\.\[video\]'"):
        clip_extent(tmp_path / "a.mp4", VIEW)
    assert read_sound(Samples(tone(0.1, 16000), 16000), HEAR).shape == (1600,)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.sampled_from([0.5, 1.0, 2.0, 7.5, None]),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_frames_looked_at_ascend_and_are_neither_too_many_nor_too_few(
    gaps: list[int], fps: float | None, most: int, least: int
) -> None:
    times = [sum(gaps[:k]) / 20 for k in range(len(gaps))]
    chosen = VideoSettings(fps, most, None, LIMIT, least).choose(times)
    assert chosen == sorted(set(chosen))
    assert min(least, most, len(times)) <= len(chosen) <= most
    assert chosen[0] == 0 and chosen[-1] < len(times)


# What people see.


def test_what_is_attached_can_be_opened_and_is_named_by_its_content(tmp_path: Path) -> None:
    small = attachment("image", pixels(40, 60), Extent((40, 60, 3)), 0)
    (tmp_path / small.name).write_bytes(small.data)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / small.name)), pixels(40, 60))
    assert small.name.endswith(".png") and small == attachment(
        "image", pixels(40, 60), Extent((40, 60, 3)), 0
    )
    assert small.name != attachment("image", pixels(40, 61), Extent((40, 61, 3)), 0).name
    large = attachment("image", pixels(1500, 600), Extent((1500, 600, 3)), 0)
    (tmp_path / large.name).write_bytes(large.data)
    assert large.name.endswith(".jpg") and max(Image.open(tmp_path / large.name).size) == 512
    heard = attachment("audio", tone(0.5, 8000), Extent((4000,)), 8000)
    (tmp_path / heard.name).write_bytes(heard.data)
    values, rate = soundfile.read(tmp_path / heard.name)
    assert rate == 8000 and np.abs(values - tone(0.5, 8000)).max() < 1e-4
    frames = np.stack([pixels(20, 30, k) for k in range(4)])
    seen = attachment("video", frames, Extent(frames.shape, (0.0, 0.5, 1.0, 1.5)), 0)
    (tmp_path / seen.name).write_bytes(seen.data)
    assert seen.name.endswith(".webp") and Image.open(tmp_path / seen.name).n_frames == 4
