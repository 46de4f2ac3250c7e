import math
import sys

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vardass.data import AudioDataset, FrontEnd, ImageDataset, augment, normalise
from vardass.data import audio as af
from vardass.data.file_dataset import SharedCache
from vardass.errors import InputError


def save(path, mode="RGB", size=(8, 6), value=100):
    bands = len(mode) if mode in ("RGB", "RGBA", "LA") else 1
    array = np.full((size[1], size[0], bands), value, np.uint8)
    Image.fromarray(array.squeeze(-1) if bands == 1 else array).save(path)
    return path


# ---- images


def test_image_values_shape_and_orientation(tmp_path):
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, 2] = (255, 51, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    x = ImageDataset([tmp_path / "a.png"], size=(2, 3))[0]
    assert x.shape == (3, 2, 3)
    assert x.dtype == torch.float32
    assert x[:, 0, 2].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert float(x.sum()) == pytest.approx(1.2)


def test_mixed_channel_counts_become_what_is_asked(tmp_path):
    files = [save(tmp_path / f"{mode}.png", mode) for mode in ("RGB", "L", "RGBA", "LA")]
    Image.fromarray(np.full((6, 8), 100, np.uint8)).convert("P").save(tmp_path / "p.png")
    Image.fromarray(np.full((6, 8), 100 * 256 + 7, np.uint16)).save(tmp_path / "deep.png")
    files += [tmp_path / "p.png", tmp_path / "deep.png"]
    for channels in (1, 3):
        data = ImageDataset(files, size=4, channels=channels)
        batch = torch.stack([data[i] for i in range(len(data))])
        assert batch.shape == (6, channels, 4, 4)
        assert torch.allclose(batch, torch.tensor(100 / 255), atol=2 / 255)


def test_mixed_channel_counts_without_a_choice_are_an_error(tmp_path):
    files = [save(tmp_path / "first.png", "L"), save(tmp_path / "second.png", "RGB")]
    data = ImageDataset(files, size=4, channels=None)
    assert data[0].shape == (1, 4, 4)
    with pytest.raises(InputError, match=r"second.png has 3 channels, .*first.png has 1; .*channels=3"):
        data[1]


def test_bad_images(tmp_path):
    (tmp_path / "text.png").write_text("this is text")
    (tmp_path / "empty.jpg").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "ok.png")
    whole = (tmp_path / "ok.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = ImageDataset([tmp_path / name for name in ("text.png", "empty.jpg", "cut.png", "gone.png")], size=4)
    for i, message in enumerate(
        (
            r"text.png \(12 bytes\): not an image",
            r"empty.jpg \(0 bytes\)",
            r"cut.png .*replace or remove",
            "no image at .*gone.png",
        )
    ):
        with pytest.raises(InputError, match=message):
            data[i]
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(InputError, match=r"float\.tiff has F pixels"):
        ImageDataset([tmp_path / "float.tiff"], size=4)[0]
    with pytest.raises(InputError, match="0 image files"):
        ImageDataset([])
    with pytest.raises(InputError, match="channels must be 3, 1 or None, got 4"):
        ImageDataset([tmp_path / "ok.png"], channels=4)
    with pytest.raises(InputError, match="size must be at least 1, got 0"):
        ImageDataset([tmp_path / "ok.png"], size=0)


def test_a_corrupt_image_names_itself_from_a_worker(tmp_path):
    save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"nonsense")
    loader = DataLoader(ImageDataset([tmp_path / "good.png", tmp_path / "broken.png"], size=4), 2, num_workers=1)
    with pytest.raises(InputError, match=r"broken\.png"):
        list(loader)


def test_cache_is_filled_by_workers_and_survives_the_files(tmp_path):
    files = [save(tmp_path / f"{i}.png", value=10 * i) for i in range(6)]
    plain = ImageDataset(files, size=4)
    data = ImageDataset(files, size=4, cache=True)
    wanted = torch.stack([plain[i] for i in range(6)])
    assert torch.equal(torch.cat(list(DataLoader(data, 3, num_workers=1))), wanted)
    assert bool(data.cache.filled.all())
    for file in files:
        file.unlink()
    kept = data[-1]
    assert torch.equal(kept, wanted[5])
    kept.zero_()  # a copy
    assert torch.equal(data[5], wanted[5])


def test_cache_that_cannot_fit_is_refused():
    with pytest.raises(InputError, match=r"needs 40000000.00 GB of shared memory, .* are free"):
        SharedCache(10**10, (1000, 1000), torch.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_is_determined_by_its_seed(channels):
    x = torch.rand(6, channels, 20, 24, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = augment(x, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    torch.manual_seed(6)
    assert torch.equal(augment(x, seed=1), first)
    assert not torch.equal(augment(x, seed=2), first)
    assert torch.equal(x, before)
    assert first.shape == x.shape
    assert augment(x, seed=1, size=16).shape == (6, channels, 16, 16)
    plain = augment(x, seed=1, normalised=False)
    assert float(plain.min()) >= 0.0
    assert float(plain.max()) <= 1.0
    assert torch.allclose(normalise(plain), first)


def test_each_image_of_a_batch_is_augmented_differently():
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    out = augment(image.expand(8, -1, -1, -1), seed=0, normalised=False)
    assert all(not torch.equal(out[i], out[j]) for i in range(8) for j in range(i))


def test_augmentation_has_domainbeds_rates():
    # red and green stay coloured under crop, mirroring and jitter, so equal channels tell grey
    image = torch.zeros(1, 3, 12, 12)
    image[:, 0, :, :6] = 0.8
    image[:, 1, :, 6:] = 0.8
    out = augment(image.expand(2000, -1, -1, -1), seed=0, normalised=False)
    spread = (out.amax(1) - out.amin(1)).amax((1, 2))
    grey = float((spread < 1e-4).float().mean())
    assert grey == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 2000))
    ramp = torch.linspace(0.2, 0.8, 12).expand(2000, 1, 12, 12)
    mirrored = augment(ramp, seed=0, normalised=False)
    share = float((mirrored[:, 0, 6, 1] > mirrored[:, 0, 6, -2]).float().mean())
    assert share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 2000))
    flat = augment(torch.full((2000, 1, 4, 4), 0.5), seed=0, normalised=False)[:, 0, 0, 0]
    assert float(flat.min()) >= 0.35 - 1e-4  # brightness 0.7 to 1.3; contrast does not change a flat image
    assert float(flat.max()) <= 0.65 + 1e-4
    assert float(flat.std()) == pytest.approx(0.3 / math.sqrt(12), rel=0.1)


def test_normalise_and_bad_batches():
    x = torch.tensor([0.485, 0.456, 0.406])[None, :, None, None].expand(2, 3, 4, 4)
    assert float(normalise(x).abs().max()) < 1e-6
    assert normalise(torch.ones(1, 3, 1, 1)).flatten().tolist() == pytest.approx(
        [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    )
    for bad in (torch.zeros(3, 4, 4), torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)):
        with pytest.raises(InputError, match="must be floats of shape"):
            augment(bad, seed=0)


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("PIL", lambda: ImageDataset(["a.png"]), "Pillow.*vardass\\[adapt\\]"),
        ("soundfile", lambda: AudioDataset(["a.wav"]), "soundfile.*vardass\\[audio\\]"),
        ("kornia.augmentation", lambda: augment(torch.zeros(1, 3, 5, 7), seed=0), "kornia.*vardass\\[adapt\\]"),
    ],
)
def test_missing_packages_name_their_extra(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=extra):
        make()


# ---- audio


def test_mel_scale_and_filters_against_the_formula():
    assert float(af.hertz_to_mel(torch.tensor(1000.0))) == pytest.approx(999.9855, abs=1e-3)
    f = torch.tensor([10.0, 440.0, 5000.0], dtype=torch.float64)
    assert torch.allclose(af.mel_to_hertz(af.hertz_to_mel(f)), f)
    bands, fft, rate, low, high = 7, 512, 8000, 100.0, 3000.0
    filters = af.mel_filters(bands, fft, rate, low=low, high=high)
    assert filters.shape == (bands, fft // 2 + 1)
    mel = [2595 * math.log10(1 + h / 700) for h in (low, high)]
    corner = [700 * (10 ** ((mel[0] + (mel[1] - mel[0]) * i / (bands + 1)) / 2595) - 1) for i in range(bands + 2)]
    for b in range(bands):
        for j in range(fft // 2 + 1):
            h = j * rate / fft
            rise = (h - corner[b]) / (corner[b + 1] - corner[b])
            fall = (corner[b + 2] - h) / (corner[b + 2] - corner[b + 1])
            assert float(filters[b, j]) == pytest.approx(max(0.0, min(rise, fall)), abs=1e-9)


def test_bad_mel_bands():
    with pytest.raises(InputError, match=r"from 100 to 6000 Hz do not fit between 0 and 5000.0"):
        af.mel_filters(8, 512, 10_000, low=100, high=6000)
    with pytest.raises(InputError, match="of 100 mel bands lie between"):
        af.mel_filters(100, 64, 8000)


def test_mel_spectrogram_against_a_direct_sum():
    g = torch.Generator().manual_seed(0)
    wave = torch.randn(2, 50, dtype=torch.float64, generator=g)
    fft, hop = 16, 5
    filters = af.mel_filters(2, fft, 8000)
    result = af.mel_spectrogram(wave, filters, fft_size=fft, hop=hop)
    assert result.shape == (2, 2, 1 + 50 // hop)
    for row in range(2):
        for t in (0, 3, 10):
            power = []
            for j in range(fft // 2 + 1):
                total = 0j
                for m in range(fft):
                    place = t * hop + m - fft // 2
                    if 0 <= place < 50:
                        window = 0.5 - 0.5 * math.cos(2 * math.pi * m / fft)
                        angle = -2 * math.pi * j * m / fft
                        total += float(wave[row, place]) * window * complex(math.cos(angle), math.sin(angle))
                power.append(abs(total) ** 2)
            for b in range(2):
                direct = sum(float(filters[b, j]) * power[j] for j in range(fft // 2 + 1))
                assert float(result[row, b, t]) == pytest.approx(direct, rel=1e-9)


def test_pcen_against_its_recursion():
    energy = torch.rand(3, 2, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # three blocks
    s, alpha, delta, r, eps = 0.04, 0.9, 1.5, 0.4, 1e-5
    result = af.pcen(energy, s=s, alpha=alpha, delta=delta, r=r, eps=eps)
    mean = energy[..., 0]
    for t in range(600):
        mean = (1 - s) * mean + s * energy[..., t]
        direct = (energy[..., t] / (eps + mean) ** alpha + delta) ** r - delta**r
        assert torch.allclose(result[..., t], direct, rtol=1e-10)


def test_pcen_removes_gain():
    energy = torch.rand(4, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    plain, loud = (af.pcen(gain * energy, alpha=1.0, eps=1e-12) for gain in (1.0, 100.0))
    assert torch.allclose(plain, loud, rtol=1e-9)


@pytest.mark.parametrize(("rate", "new"), [(8000, 10_000), (44_100, 10_000), (10_000, 10_000), (22_050, 8000)])
def test_resampling_keeps_a_tone(rate, new):
    tone = torch.sin(2 * math.pi * 440 * torch.arange(rate, dtype=torch.float64) / rate)
    result = af.resample(tone, rate, new)
    wanted = torch.sin(2 * math.pi * 440 * torch.arange(new, dtype=torch.float64) / new)
    assert result.shape == (new,)
    assert float((result - wanted)[200:-200].abs().max()) < 2e-3  # away from the ends


def test_polyphase_removes_what_linear_folds():
    rate, new = 40_000, 10_000
    tone = torch.sin(2 * math.pi * 9000 * torch.arange(rate, dtype=torch.float64) / rate)  # above 5 kHz
    assert float(af.resample(tone, rate, new)[200:-200].abs().max()) < 1e-2
    assert float(af.resample(tone, rate, new, method="linear").abs().max()) > 0.5
    ramp = torch.arange(10.0)[None]
    assert af.resample(ramp, 2, 4, method="linear")[0, :4].tolist() == [0.0, 0.5, 1.0, 1.5]
    with pytest.raises(InputError, match=r"ratio 44101:16000 need a filter .*'linear'"):
        af.resample(torch.zeros(10), 44_101, 16_000)
    with pytest.raises(InputError, match="method must be"):
        af.resample(torch.zeros(10), 2, 3, method="cubic")


def test_audio_files_become_spectrograms_of_one_shape(tmp_path):
    front = FrontEnd(rate=4000, seconds=0.5, fft_size=256, hop=64, bands=12)
    generator = np.random.default_rng(0)
    for name, rate, seconds, channels in (("a.wav", 4000, 2.0, 1), ("b.flac", 8000, 0.2, 2), ("c.ogg", 22_050, 0.5, 1)):
        soundfile.write(tmp_path / name, generator.normal(0, 0.1, (int(rate * seconds), channels)), rate)
    data = AudioDataset([tmp_path / name for name in ("a.wav", "b.flac", "c.ogg")], front_end=front, cache=True)
    batch = next(iter(DataLoader(data, 3)))
    assert batch.shape == (3, *front.shape) == (3, 1, 12, 32)
    assert bool(torch.isfinite(batch).all())
    assert torch.equal(data[1], batch[1])  # from the cache
    assert torch.allclose(batch[0, 0], front(data.wave(0)), atol=1e-4)


def test_the_middle_is_kept_and_silence_is_put_around(tmp_path):
    front = FrontEnd(rate=1000, seconds=0.1, fft_size=64, hop=32, bands=4, low=0.0)
    long = np.arange(300) / 1000
    stereo = np.stack([np.full(40, 0.5), np.full(40, 0.25)], 1)
    soundfile.write(tmp_path / "long.wav", long, 1000, subtype="FLOAT")
    soundfile.write(tmp_path / "short.wav", stereo, 1000, subtype="FLOAT")
    data = AudioDataset([tmp_path / "long.wav", tmp_path / "short.wav"], front_end=front)
    assert torch.allclose(data.wave(0), torch.arange(100, 200) / 1000)
    wave = data.wave(1)
    assert wave.nonzero().flatten().tolist() == list(range(30, 70))
    assert torch.allclose(wave[30:70], torch.tensor(0.375))


def test_bad_audio(tmp_path):
    (tmp_path / "text.wav").write_text("this is text")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 8000)
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan] * 50), 8000, subtype="FLOAT")
    names = ("text.wav", "none.wav", "nan.wav", "gone.wav")
    data = AudioDataset([tmp_path / name for name in names], front_end=FrontEnd(seconds=0.1))
    messages = (r"text.wav \(12 bytes\)", "none.wav holds 0 samples", "nan.wav has NaN", "no sound file at .*gone.wav")
    for i, message in enumerate(messages):
        with pytest.raises(InputError, match=message):
            data[i]
    with pytest.raises(InputError, match="0 sound files"):
        AudioDataset([])
    with pytest.raises(InputError, match="no sample"):
        AudioDataset(["a.wav"], front_end=FrontEnd(seconds=0.0))
