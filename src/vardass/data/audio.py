"""Sound: files read with soundfile in the workers, resampled, and turned into mel bands under PCEN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vardass.data.file_dataset import FileDataset
from vardass.errors import InputError, needs_extra
from vardass.files import PathLike
from vardass.validate import check_count, check_number, choose

AUDIO_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff", ".au", ".caf")
_MOST_PHASES = 10_000  # of a resampling filter


@dataclass(frozen=True)
class FrontEnd:
    """How sound becomes an input of shape (1, bands, frames).

    The defaults suit humpback calls, most of whose energy is between 50 Hz and 2 kHz. They are our choice: the code of
    the study (DCASE 2023) whose front end the paper uses is not public.

    Attributes
    ----------
    rate : int
        Samples per second after resampling.
    seconds : float
        Length; longer recordings are cut to their middle, shorter ones get silence on both sides.
    fft_size, hop : int
        Window and step of the spectrogram, in samples.
    bands, low, high :
        Mel bands, and the frequencies in hertz that they span; ``high`` None is half the rate.
    s, alpha, delta, r, eps : float
        Constants of PCEN, see `pcen`.
    """

    rate: int = 10_000
    seconds: float = 4.0
    fft_size: int = 1024
    hop: int = 256
    bands: int = 64
    low: float = 30.0
    high: float | None = None
    s: float = 0.025
    alpha: float = 0.98
    delta: float = 2.0
    r: float = 0.5
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(getattr(type(self), name), int):
                check_count(value, f"{name} of the front end")
            elif name != "high" or value is not None:
                check_number(value, f"{name} of the front end", low=0.0)
        if self.samples < 1:
            raise InputError(f"{self.seconds} s at rate {self.rate} is no sample; give seconds above 0")

    @classmethod
    def of(cls, given: FrontEnd | Mapping[str, Any] | None) -> FrontEnd:
        """A front end as given, or from values by name, as in YAML; what is not given is the default."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            raise InputError(f"front_end must be values by name, such as {{'rate': 8000}}, got {given!r}")
        for name in given or {}:
            choose(name, "setting of the front end:", [field.name for field in fields(cls)])
        return cls(**(given or {}))

    @property
    def samples(self) -> int:
        """Length in samples."""
        return round(self.rate * self.seconds)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one input."""
        return 1, self.bands, 1 + self.samples // self.hop

    @cached_property
    def filters(self) -> Tensor:
        """Mel filters of shape (bands, fft_size // 2 + 1)."""
        return mel_filters(self.bands, self.fft_size, self.rate, low=self.low, high=self.high)

    def __call__(self, wave: Tensor) -> Tensor:
        """Turn (..., samples) into (..., bands, frames)."""
        energy = mel_spectrogram(wave, self.filters, fft_size=self.fft_size, hop=self.hop)
        return pcen(energy, s=self.s, alpha=self.alpha, delta=self.delta, r=self.r, eps=self.eps)


class AudioDataset(FileDataset):
    """Sound files as float32 tensors of shape (1, bands, frames).

    Channels are averaged, the middle is cut out or silence is put around, the rate is changed, and PCEN is taken
    of the mel bands. Only the part that is used is read.

    Parameters
    ----------
    paths : sequence of path
        Files that libsndfile reads: WAV, FLAC, OGG, MP3, AIFF and others.
    front_end : FrontEnd or mapping, optional
        Rate, length and bands; see `FrontEnd.of`.
    cache : bool
        Keep spectrograms in memory that the workers share.
    """

    def __init__(
        self, paths: Sequence[PathLike], *, front_end: FrontEnd | Mapping[str, Any] | None = None, cache: bool = False
    ) -> None:
        super().__init__(paths, "sound")
        _soundfile()
        self.front_end = FrontEnd.of(front_end)
        _ = self.front_end.filters  # bands that cannot be are refused before training
        if cache:
            self.keep(self.front_end.shape, torch.float32)

    def decode(self, index: int) -> Tensor:
        """Spectrogram of one file."""
        return self.front_end(self.wave(index))[None]

    def wave(self, index: int) -> Tensor:
        """Samples of one file at the rate and of the length of the front end, shape (samples,)."""
        wave, rate = _read_middle(self.paths[index], self.front_end.seconds)
        wave = resample(wave, rate, self.front_end.rate)
        spare = len(wave) - self.front_end.samples
        if spare >= 0:
            return wave[spare // 2 : spare // 2 + self.front_end.samples]
        return torch.nn.functional.pad(wave, (-spare // 2, -spare - (-spare // 2)))


def _read_middle(path: str, seconds: float) -> tuple[Tensor, int]:
    soundfile = _soundfile()
    if not Path(path).is_file():
        raise InputError(f"no sound file at {path}; check the path, or unpack the data set again")
    try:
        with soundfile.SoundFile(path) as file:
            rate, total = int(file.samplerate), int(file.frames)
            wanted = min(total, math.ceil(seconds * rate))
            file.seek((total - wanted) // 2)
            values = file.read(wanted, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, OSError, ValueError) as error:
        raise InputError(
            f"cannot read the sound file {path} ({Path(path).stat().st_size} bytes): {str(error).splitlines()[0]}; "
            "replace or remove the file"
        ) from None
    if not len(values):
        raise InputError(f"{path} holds 0 samples of sound; replace or remove the file")
    wave = torch.from_numpy(values).mean(1)
    if not bool(torch.isfinite(wave.sum())):
        raise InputError(f"{path} has NaN or infinite samples; replace or remove the file")
    return wave, rate


def _soundfile() -> Any:
    try:
        return import_module("soundfile")
    except (ModuleNotFoundError, OSError):  # OSError: the library libsndfile is not there
        raise InputError("reading sound needs soundfile, which is not usable: pip install 'vardass[audio]'") from None


# --- from sound to mel bands ---


def resample(wave: Tensor, rate: int, new_rate: int) -> Tensor:
    """Change the sampling rate of ``wave``, shape (..., n), to a result of length ceil(n new_rate / rate)."""
    if rate == new_rate:
        return wave
    with needs_extra("audio"):
        from scipy.signal import resample_poly
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    if up > _MOST_PHASES:
        raise InputError(
            f"rates in the ratio {down}:{up} take a filter for each of {up} positions, more than {_MOST_PHASES}; use "
            "a rate that shares a large divisor with the other"
        )
    return torch.from_numpy(resample_poly(wave.numpy(), up, down, axis=-1)).to(wave.dtype)


def mel_filters(bands: int, fft_size: int, rate: int, *, low: float, high: float | None) -> Tensor:
    """Triangles of height 1, evenly spaced on the mel scale: float64 of shape (bands, fft_size // 2 + 1).

    The scale is 2595 log10(1 + f / 700). Band b rises from corner b to corner b + 1 and falls to corner b + 2, of
    ``bands + 2`` corners from ``low`` to ``high`` hertz (by default half the rate).
    """
    high = rate / 2 if high is None else high
    if not 0 <= low < high <= rate / 2:
        raise InputError(
            f"mel bands from {low} to {high} Hz do not fit between 0 and {rate / 2} Hz, half the sampling rate; change "
            "low, high or the rate"
        )
    ends = 2595.0 * torch.log10(1.0 + torch.tensor([low, high], dtype=torch.float64) / 700.0)
    mels = torch.linspace(float(ends[0]), float(ends[1]), bands + 2, dtype=torch.float64)
    corners = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    bins = torch.arange(fft_size // 2 + 1, dtype=torch.float64) * (rate / fft_size)
    rise = (bins - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    fall = (corners[2:, None] - bins) / (corners[2:] - corners[1:-1])[:, None]
    filters = torch.minimum(rise, fall).clamp(min=0.0)
    empty = int((filters.sum(1) == 0).sum())
    if empty:
        raise InputError(
            f"{empty} of {bands} mel bands lie between two of the {len(bins)} frequencies of fft_size {fft_size}; use "
            "fewer bands or a larger fft_size"
        )
    return filters


def mel_spectrogram(wave: Tensor, filters: Tensor, *, fft_size: int, hop: int) -> Tensor:
    """Energy in mel bands: (..., n) to (..., bands, 1 + n // hop), squared magnitudes under Hann windows.

    Frame t is centred on sample t hop; zeros are put before the beginning and after the end.
    """
    window = torch.hann_window(fft_size, dtype=wave.dtype, device=wave.device)
    flat = wave.reshape(-1, wave.shape[-1])
    spectrum = torch.stft(flat, fft_size, hop, window=window, center=True, pad_mode="constant", return_complex=True)
    energy = filters.to(wave) @ spectrum.abs().square()
    return energy.reshape(*wave.shape[:-1], *energy.shape[-2:])


def pcen(energy: Tensor, *, s: float, alpha: float, delta: float, r: float, eps: float) -> Tensor:
    """Per-channel energy normalisation: (E / (eps + M)^alpha + delta)^r - delta^r, M the running mean of E.

    Divides each band by its recent mean, so steady noise and the recorder's gain go and calls stay (Wang et al.,
    ICASSP 2017, whose constants are those of `FrontEnd`). ``energy`` has shape (..., bands, frames), and
    M_0 = E_0, M_t = (1 - s) M_{t-1} + s E_t.
    """
    with needs_extra("audio"):
        from scipy.signal import lfilter
    means, _ = lfilter([s], [1.0, s - 1.0], energy.numpy(), zi=(1.0 - s) * energy[..., :1].numpy())
    ratio = energy / (eps + torch.from_numpy(means).to(energy.dtype)) ** alpha
    result: Tensor = (ratio + delta) ** r - delta**r
    return result
