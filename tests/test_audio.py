"""Sound: mel bands, PCEN, resampling and sound files, each against its formula."""

import dataclasses
import math
import sys

import numpy as np
import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

from conftest import refused
from vardass.data import AudioDataset, FrontEnd
from vardass.data import audio as af


def test_mel_scale_and_filters_against_the_formula():
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
    with refused("100 to 6000", "5000.0", "high"):
        af.mel_filters(8, 512, 10_000, low=100, high=6000)
    with refused("100 mel bands", "fft_size 64"):
        af.mel_filters(100, 64, 8000, low=0, high=None)


def test_mel_spectrogram_against_a_direct_sum():
    g = torch.Generator().manual_seed(0)
    wave = torch.randn(2, 50, dtype=torch.float64, generator=g)
    fft, hop = 16, 5
    filters = af.mel_filters(2, fft, 8000, low=0, high=None)
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
    plain, loud = (af.pcen(gain * energy, s=0.025, alpha=1.0, delta=2.0, r=0.5, eps=1e-12) for gain in (1.0, 100.0))
    assert torch.allclose(plain, loud, rtol=1e-9)


@pytest.mark.parametrize(("rate", "new"), [(8000, 10_000), (44_100, 10_000), (10_000, 10_000), (22_050, 8000)])
def test_resampling_keeps_a_tone(rate, new):
    tone = torch.sin(2 * math.pi * 440 * torch.arange(rate, dtype=torch.float64) / rate)
    result = af.resample(tone, rate, new)
    wanted = torch.sin(2 * math.pi * 440 * torch.arange(new, dtype=torch.float64) / new)
    assert result.shape == (new,)
    assert float((result - wanted)[200:-200].abs().max()) < 2e-3  # away from the ends


def test_resampling_removes_what_would_be_folded():
    rate, new = 40_000, 10_000
    tone = torch.sin(2 * math.pi * 9000 * torch.arange(rate, dtype=torch.float64) / rate)  # above 5 kHz
    assert float(af.resample(tone, rate, new)[200:-200].abs().max()) < 1e-2
    with refused("44101:16000", 10000, "rate"):
        af.resample(torch.zeros(10), 44_101, 16_000)


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


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rat": 8000}, ("'rat'", "'rate'")),
        ({"rate": "fast"}, ("rate", "whole number", "'fast'")),
        ({"rate": True}, ("rate", "whole number", True)),
        ({"low": "0 Hz"}, ("low", "number", "'0 Hz'")),
        ({"seconds": None}, ("seconds", "number", None)),
        ({"hop": 0}, ("hop", 1, 0)),
        ("8000", ("front_end", "{'rate': 8000}", "'8000'")),
    ],
)
def test_bad_front_ends(given, named):
    with refused(*named):
        AudioDataset(["a.wav"], front_end=given)


def test_a_front_end_is_made_of_values_by_name():
    assert FrontEnd.of(None) == FrontEnd() == FrontEnd.of(dataclasses.asdict(FrontEnd()))
    assert FrontEnd.of({"high": 2000, "seconds": 1}) == FrontEnd(high=2000, seconds=1)
    assert FrontEnd.of(FrontEnd(rate=8000)).rate == 8000


def test_bad_audio(tmp_path):
    (tmp_path / "text.wav").write_text("this is text")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 8000)
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan] * 50), 8000, subtype="FLOAT")
    names = ("text.wav", "none.wav", "nan.wav", "gone.wav")
    data = AudioDataset([tmp_path / name for name in names], front_end=FrontEnd(seconds=0.1))
    said = (("12 bytes", "Format not recognised"), ("0 samples",), ("NaN",), ("no sound file",))
    for i, (name, named) in enumerate(zip(names, said)):
        with refused(tmp_path / name, *named):
            data[i]
    with refused("0 sound files", "at least one"):
        AudioDataset([])
    with refused("0.0 s", "seconds"):
        AudioDataset(["a.wav"], front_end=FrontEnd(seconds=0.0))


def test_missing_soundfile_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with refused("soundfile", "vardass[audio]"):
        AudioDataset(["a.wav"])
