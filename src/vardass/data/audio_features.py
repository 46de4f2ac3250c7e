"""From sound to pictures: resampling, mel bands and per-channel energy normalisation (PCEN), in plain torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.validate import check_count

__all__ = ["hertz_to_mel", "mel_filters", "mel_spectrogram", "mel_to_hertz", "pcen", "resample", "smooth"]

_KERNEL_LIMIT = 1 << 24  # entries of a polyphase filter bank: 64 MB
_BLOCK = 256


def resample(
    wave: Tensor, rate: int, new_rate: int, *, method: Literal["polyphase", "linear"] = "polyphase", zeros: int = 16
) -> Tensor:
    """Change the sampling rate of ``wave``, shape (..., n), to a result of length ceil(n new_rate / rate).

    Parameters
    ----------
    wave : Tensor of shape (..., n)
        Samples at ``rate`` per second.
    rate, new_rate : int
        Per second.
    method : {"polyphase", "linear"}
        Band-limited: sinc at 0.945 of the lower Nyquist frequency, under a squared cosine of ``zeros`` zero
        crossings on each side. Or straight lines between samples, which folds high frequencies into low ones.
    zeros : int
        Longer filters cut more sharply.
    """
    rate = check_count(rate, "rate")
    new_rate = check_count(new_rate, "new_rate")
    if rate == new_rate:
        return wave
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    length = math.ceil(wave.shape[-1] * new / old)
    flat = wave.reshape(-1, wave.shape[-1])
    if method == "linear":
        at = (torch.arange(length, device=wave.device, dtype=torch.float64) * old / new).clamp(max=flat.shape[-1] - 1)
        left = at.long()
        right = (left + 1).clamp(max=flat.shape[-1] - 1)
        result = torch.lerp(flat[:, left], flat[:, right], (at - left).to(wave.dtype))
    elif method == "polyphase":
        bank = _polyphase(old, new, zeros).to(wave)
        width = (bank.shape[-1] - old) // 2
        padded = torch.nn.functional.pad(flat[:, None], (width, width + old))
        phases = torch.nn.functional.conv1d(padded, bank[:, None], stride=old)  # (rows, new, steps)
        result = phases.transpose(1, 2).flatten(1)[:, :length]
    else:
        raise InputError(f"method must be 'polyphase' or 'linear', got {method!r}")
    return result.reshape(*wave.shape[:-1], length)


@lru_cache(maxsize=16)
def _polyphase(old: int, new: int, zeros: int) -> Tensor:
    """One filter for each of the ``new`` positions that an output sample can have between ``old`` input samples."""
    cutoff = 0.945 * min(old, new)  # zero crossings per unit of time, which is ``old`` input samples
    width = math.ceil(zeros * old / cutoff)
    if new * (2 * width + old) > _KERNEL_LIMIT:
        raise InputError(
            f"rates in the ratio {old}:{new} need a filter of {new * (2 * width + old)} entries, more than "
            f"{_KERNEL_LIMIT}; use method 'linear', or a rate that shares a large divisor with the other"
        )
    inputs = torch.arange(-width, width + old, dtype=torch.float64) / old
    outputs = torch.arange(new, dtype=torch.float64) / new
    t = ((inputs - outputs[:, None]) * cutoff).clamp(-zeros, zeros)
    return torch.sinc(t) * torch.cos(math.pi * t / (2 * zeros)) ** 2 * (cutoff / old)


def hertz_to_mel(hertz: Tensor) -> Tensor:
    """Mel scale 2595 log10(1 + f / 700)."""
    return 2595.0 * torch.log10(1.0 + hertz / 700.0)


def mel_to_hertz(mel: Tensor) -> Tensor:
    """Inverse of `hertz_to_mel`."""
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def mel_filters(bands: int, fft_size: int, rate: int, *, low: float = 0.0, high: float | None = None) -> Tensor:
    """Triangles of height 1, evenly spaced on the mel scale: float64 of shape (bands, fft_size // 2 + 1).

    Band b rises from corner b to corner b + 1 and falls to corner b + 2, of ``bands + 2`` corners from ``low`` to
    ``high`` hertz (by default half the rate).
    """
    high = rate / 2 if high is None else high
    if not 0 <= low < high <= rate / 2:
        raise InputError(
            f"mel bands from {low} to {high} Hz do not fit between 0 and {rate / 2} Hz, half the sampling rate; change "
            "low, high or the rate"
        )
    ends = hertz_to_mel(torch.tensor([low, high], dtype=torch.float64))
    corners = mel_to_hertz(torch.linspace(float(ends[0]), float(ends[1]), bands + 2, dtype=torch.float64))
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


def smooth(energy: Tensor, s: float) -> Tensor:
    """Running mean over the last axis: M_0 = E_0, M_t = (1 - s) M_{t-1} + s E_t.

    Blocks of frames are products with a triangular matrix, since M_t = (1-s)^{t+1} M_{-1} + s sum_j (1-s)^{t-j} E_j.
    """
    frames = energy.shape[-1]
    step = torch.arange(min(_BLOCK, frames), device=energy.device, dtype=energy.dtype)
    lag = step[:, None] - step
    matrix = torch.where(lag >= 0, s * (1.0 - s) ** lag.clamp(min=0), 0.0)
    decay = (1.0 - s) ** (step + 1)
    state = energy[..., :1]
    parts = []
    for start in range(0, frames, _BLOCK):
        block = energy[..., start : start + _BLOCK]
        count = block.shape[-1]
        parts.append(block @ matrix[:count, :count].T + state * decay[:count])
        state = parts[-1][..., -1:]
    return torch.cat(parts, -1)


def pcen(
    energy: Tensor,
    *,
    s: float = 0.025,
    alpha: float = 0.98,
    delta: float = 2.0,
    r: float = 0.5,
    eps: float = 1e-6,
) -> Tensor:
    """Per-channel energy normalisation: (E / (eps + M)^alpha + delta)^r - delta^r, M the running mean of E.

    Divides each band by its recent mean, so steady noise and the recorder's gain go and calls stay (Wang et al.,
    ICASSP 2017, whose constants are the defaults). ``energy`` has shape (..., bands, frames).
    """
    ratio = energy / (eps + smooth(energy, s)) ** alpha
    result: Tensor = (ratio + delta) ** r - delta**r
    return result
