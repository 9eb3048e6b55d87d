import io
import time

import av
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from modeling_moemb import video_moemb
from modeling_moemb.media_moemb import MediaError
from modeling_moemb.video_moemb import FrameSampling, load_video


ALL = FrameSampling(fps=None)


def levels(count: int, side: int = 16) -> np.ndarray:
    """Frames that tell their number by their grey level."""
    return np.stack([np.full((side, side, 3), 10 + 20 * index, np.uint8) for index in range(count)])


def encode_video(frames: np.ndarray, rate: int = 8, fmt: str = "mp4", codec: str = "mpeg4") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def animation(fmt: str, frames: np.ndarray, duration: int = 125, **settings) -> bytes:
    buffer = io.BytesIO()
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(buffer, fmt, save_all=True, append_images=images[1:], duration=duration, **settings)
    return buffer.getvalue()


class TestSampling:
    @pytest.mark.parametrize(
        ("sampling", "total", "rate", "expected"),
        [
            (FrameSampling(num_frames=4), 10, 25.0, [0, 3, 6, 9]),
            (FrameSampling(num_frames=8), 3, None, [0, 1, 2]),
            (FrameSampling(num_frames=8), 1, None, [0]),
            (FrameSampling(fps=2.0), 40, 8.0, list(np.linspace(0, 39, 10).round())),
            (FrameSampling(fps=2.0), 8, 8.0, [0, 2, 5, 7]),
            (FrameSampling(fps=2.0), 2, 8.0, [0, 1]),
            (FrameSampling(fps=2.0, max_frames=3), 40, 8.0, [0, 20, 39]),
            (FrameSampling(fps=2.0), 5, None, [0, 1, 2, 3, 4]),
            (FrameSampling(fps=2.0, max_frames=2), 5, None, [0, 4]),
        ],
    )
    def test_indices(self, sampling, total, rate, expected):
        assert sampling.indices(total, rate).tolist() == expected


class TestFrames:
    def test_arrays_and_lists(self):
        frames = levels(5)
        sources = [
            frames,
            torch.from_numpy(frames),
            frames.transpose(0, 3, 1, 2),
            frames[None],
            list(frames),
            [Image.fromarray(frame) for frame in frames],
            {"frames": frames},
            {"array": frames, "video_metadata": None},
        ]
        for source in sources:
            clip = load_video(source, ALL)
            np.testing.assert_array_equal(clip.frames, frames)
            np.testing.assert_allclose(clip.times, np.arange(5) / 24)

    def test_rate_of_frames(self):
        for source in ({"frames": levels(8), "fps": 4}, {"array": levels(8), "video_metadata": {"fps": 4}}):
            clip = load_video(source, FrameSampling(fps=1.0, min_frames=2))
            np.testing.assert_array_equal(clip.frames[:, 0, 0, 0], [10, 150])
            np.testing.assert_allclose(clip.times, [0, 1.75])

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ([], "empty list"),
            (np.zeros((0, 4, 4, 3), np.uint8), "no video"),
            (np.zeros((4, 4), np.uint8), "no video"),
            ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)], "one size"),
            ([np.zeros((4, 4, 3), np.uint8), None], "frame 1: a NoneType is no image"),
            ([np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), np.nan)], "frame 1: .*NaN"),
            (np.full((2, 4, 4, 3), np.nan), "NaN"),
            ({"frames": levels(2), "fps": 0}, "fps must be a positive number"),
            ({"frames": levels(2), "rate": 3}, "unknown keys"),
            ("missing.mp4", "does not exist"),
            ("https://example.org/a.mp4", "allow_remote_media"),
            (b"rubbish", "cannot be read"),
            (5, "is no video"),
            (np.zeros((16, 16, 3), np.uint8), r"is a picture: .* array\[None\]"),
        ],
    )
    def test_refused(self, source, message):
        with pytest.raises(MediaError, match=message):
            load_video(source, ALL)

    def test_grey_frames(self):
        np.testing.assert_array_equal(load_video(levels(3)[..., 0], ALL).frames, levels(3))

    def test_nothing_runs_to_draw_a_file(self, monkeypatch):
        """Pillow would have Ghostscript draw an EPS file."""
        drawn = []
        monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: drawn.append(args))
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16)).save(buffer, "EPS")
        for source in (buffer.getvalue(), [buffer.getvalue()], Image.open(buffer)):
            with pytest.raises(MediaError, match="runs other programs"):
                load_video(source, ALL)
        assert not drawn


class TestFiles:
    @pytest.mark.parametrize(("fmt", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4")])
    def test_containers(self, tmp_path, fmt, codec):
        data = encode_video(levels(10), 8, fmt, codec)
        path = tmp_path / f"clip.{fmt}"
        path.write_bytes(data)
        for source in (data, path, str(path), io.BytesIO(data)):
            clip = load_video(source, ALL)
            assert clip.frames.shape == (10, 16, 16, 3)
            assert np.abs(clip.frames[:, 0, 0, 0].astype(int) - levels(10)[:, 0, 0, 0]).max() < 6
            np.testing.assert_allclose(clip.times, np.arange(10) / 8, atol=2e-3)

    def test_only_sampled_frames_are_kept(self):
        clip = load_video(encode_video(levels(10), 8), FrameSampling(num_frames=3))
        assert np.abs(clip.frames[:, 0, 0, 0].astype(int) - [10, 90, 190]).max() < 6
        np.testing.assert_allclose(clip.times, [0, 0.5, 9 / 8], atol=2e-3)

    def test_one_frame(self):
        clip = load_video(encode_video(levels(1)), FrameSampling())
        assert clip.frames.shape == (1, 16, 16, 3)
        assert clip.times.tolist() == [0]

    def test_a_file_leads_nowhere_else(self, tmp_path, monkeypatch):
        """FFmpeg's lists and session descriptions would open other files and sockets."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other.mp4").write_bytes(encode_video(levels(2)))
        address = "IN IP4 127.0.0.1"
        media = "m=video 50000 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
        session = f"v=0\r\no=- 0 0 {address}\r\ns=x\r\nc={address}\r\nt=0 0\r\n{media}"
        for content in (b"ffconcat version 1.0\nfile other.mp4\n", session.encode()):
            (tmp_path / "list.mp4").write_bytes(content)
            for source in (content, "list.mp4"):
                start = time.monotonic()
                with pytest.raises(MediaError, match="cannot be read"):
                    load_video(source, ALL)
                assert time.monotonic() - start < 5

    def test_cut_off_file(self):
        with pytest.raises(MediaError, match="cannot be read"):
            load_video(encode_video(levels(10))[:200], ALL)

    def test_without_pyav(self, monkeypatch):
        data = encode_video(levels(2))
        monkeypatch.setattr(video_moemb, "av", None)
        with pytest.raises(MediaError, match="pip install av"):
            load_video(data, ALL)

    def test_sound_alone_is_no_video(self):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="wav") as container:
            stream = container.add_stream("pcm_s16le", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        with pytest.raises(MediaError, match="no video stream"):
            load_video(buffer.getvalue(), ALL)


class TestAnimations:
    @pytest.mark.parametrize(("fmt", "settings"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
    def test_all_frames_with_their_times(self, fmt, settings):
        data = animation(fmt, levels(6), duration=120, **settings)
        for source in (data, Image.open(io.BytesIO(data))):
            clip = load_video(source, ALL)
            assert np.abs(clip.frames[:, 0, 0, 0].astype(int) - levels(6)[:, 0, 0, 0]).max() <= 1
            np.testing.assert_allclose(clip.times, np.arange(6) * 0.12)

    def test_apng_default_image_is_no_frame(self):
        buffer = io.BytesIO()
        images = [Image.fromarray(frame) for frame in levels(4)]
        Image.new("RGB", (16, 16), "red").save(
            buffer, "PNG", save_all=True, append_images=images, default_image=True, duration=100
        )
        np.testing.assert_array_equal(load_video(buffer.getvalue(), ALL).frames, levels(4))

    def test_still_picture_is_a_video_of_one_frame(self):
        clip = load_video(Image.fromarray(levels(1)[0]), FrameSampling())
        np.testing.assert_array_equal(clip.frames, levels(1))

    def test_transparent_frames_lie_on_white(self):
        frames = [Image.new("RGBA", (4, 4), (0, 0, 0, 0)), Image.new("RGBA", (4, 4), (0, 0, 255, 255))]
        buffer = io.BytesIO()
        frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:], duration=100, lossless=True)
        clip = load_video(buffer.getvalue(), ALL)
        np.testing.assert_array_equal(clip.frames[:, 0, 0], [[255, 255, 255], [0, 0, 255]])


class TestDecoderObject:
    def test_torchcodec_interface(self):
        class Metadata:
            num_frames, average_fps = 6, 2.0

        class Batch:
            def __init__(self, data):
                self.data = data

        class Decoder:
            metadata = Metadata()

            def get_frames_at(self, indices):
                return Batch(torch.from_numpy(levels(6)[indices]).permute(0, 3, 1, 2))

        clip = load_video(Decoder(), FrameSampling(num_frames=2))
        np.testing.assert_array_equal(clip.frames, levels(6)[[0, 5]])
        np.testing.assert_allclose(clip.times, [0, 2.5])
