"""Sound files as PCEN mel spectrograms of one length, read in the workers with soundfile."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vardass.data.audio_features import mel_filters, mel_spectrogram, pcen, resample
from vardass.data.cache import SharedCache
from vardass.errors import InputError

__all__ = ["AUDIO_ENDINGS", "AudioDataset", "FrontEnd"]

AUDIO_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff", ".au", ".caf")


@dataclass(frozen=True)
class FrontEnd:
    """How sound becomes an input of shape (1, bands, frames).

    The defaults suit humpback calls, most of whose energy is between 50 Hz and 2 kHz. They are ours: the front end
    that the paper refers to is described elsewhere and its code is not public.

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
    resampling : {"polyphase", "linear"}
        See `resample`.
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
    resampling: Literal["polyphase", "linear"] = "polyphase"

    @property
    def samples(self) -> int:
        """Length in samples."""
        return round(self.rate * self.seconds)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one input."""
        return 1, self.bands, 1 + self.samples // self.hop

    def filters(self) -> Tensor:
        """Mel filters of shape (bands, fft_size // 2 + 1)."""
        return mel_filters(self.bands, self.fft_size, self.rate, low=self.low, high=self.high)

    def __call__(self, wave: Tensor, filters: Tensor | None = None) -> Tensor:
        """Turn (..., samples) into (..., bands, frames); ``filters`` spares making them again."""
        bank = self.filters() if filters is None else filters
        energy = mel_spectrogram(wave, bank, fft_size=self.fft_size, hop=self.hop)
        return pcen(energy, s=self.s, alpha=self.alpha, delta=self.delta, r=self.r, eps=self.eps)


class AudioDataset(Dataset[Tensor]):
    """Sound files as float32 tensors of shape (1, bands, frames).

    Channels are averaged, the middle is cut out or silence is put around, the rate is changed, and PCEN is taken
    of the mel bands. Only the part that is used is read.

    Parameters
    ----------
    paths : sequence of path
        Files that libsndfile reads: WAV, FLAC, OGG, MP3, AIFF and others.
    front_end : FrontEnd, optional
        Rate, length and bands.
    cache : bool
        Keep spectrograms in memory that the workers share.

    Raises
    ------
    InputError
        If there are no paths, if soundfile is missing; and, when an item is read, if its file is not sound.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        front_end: FrontEnd | None = None,
        cache: bool = False,
    ) -> None:
        if not len(paths):
            raise InputError("0 sound files were given; give at least one")
        _soundfile()
        self.paths = [str(path) for path in paths]
        self.front_end = front_end or FrontEnd()
        if self.front_end.samples < 1:
            raise InputError(
                f"{self.front_end.seconds} s at rate {self.front_end.rate} is no sample; give seconds above 0"
            )
        self.filters = self.front_end.filters().float()
        self.cache = SharedCache(len(paths), self.front_end.shape, torch.float32) if cache else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        index = range(len(self))[int(index)]
        result = None if self.cache is None else self.cache.get(index)
        if result is None:
            result = self.front_end(self.wave(index), self.filters)[None]
            if self.cache is not None:
                self.cache.put(index, result)
        return result

    def wave(self, index: int) -> Tensor:
        """Samples of one file at the rate and of the length of the front end, shape (samples,)."""
        wave, rate = _read_middle(self.paths[index], self.front_end.seconds)
        wave = resample(wave, rate, self.front_end.rate, method=self.front_end.resampling)
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
