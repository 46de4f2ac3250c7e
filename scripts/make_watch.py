"""Derive the embedded smart-watch data from the PyPI package seglearn 1.2.5 (BSD-3-Clause).

    python scripts/make_watch.py [--wheel seglearn-1.2.5-py3-none-any.whl] [--out src/vardass/data/watch]

The package holds 140 recordings of 10 people doing 7 shoulder exercises, with six channels of a watch on
either wrist at 50 Hz. Each recording is cut into windows of 2 s with 50 % overlap, each window and channel is
described by the 13 numbers of `STATISTICS`, and the result is written as ``watch.npz.xz`` with the licence
notice beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VERSION = "1.2.5"
WHEEL_SHA256 = "ec6b952c85c9627050102854b372d85951563d3b990df677d7c55547e87413dd"
RATE = 50.0  # Hz
WINDOW = 100  # samples, 2 s
STEP = 50
# xz told that values have two bytes: a quarter smaller than what savez_compressed makes
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]
BANDS = ((0.0, 1.5), (1.5, 5.0))  # Hz, lower end excluded: the mean is a statistic of its own

STATISTICS = {
    "mean": "mean",
    "std": "standard deviation",
    "min": "smallest value",
    "max": "largest value",
    "median": "median",
    "iqr": "distance between the quartiles",
    "step": "mean absolute difference of successive samples, per 0.1 s",
    "skew": "skewness",
    "kurtosis": "excess kurtosis",
    "crossings": "crossings of the mean per second",
    "frequency": "frequency with the most power, Hz",
    "power_low": "log10 of the power in 0 to 1.5 Hz",
    "power_high": "log10 of the power in 1.5 to 5 Hz",
}


def windows(recording: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cut (samples, channels) into overlapping windows (windows, WINDOW, channels)."""
    starts = range(0, len(recording) - WINDOW + 1, STEP)
    return np.stack([recording[start : start + WINDOW] for start in starts])


def describe(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Statistics of windows (n, WINDOW, channels): (n, 13 * channels), statistics of one channel together."""
    mean = x.mean(1)
    centred = x - mean[:, None]
    std = np.maximum(x.std(1), 1e-6)
    quarter, median, three_quarters = np.quantile(x, (0.25, 0.5, 0.75), axis=1)
    tapered = centred * np.hanning(WINDOW)[None, :, None]
    power = np.abs(np.fft.rfft(tapered, axis=1)) ** 2 / WINDOW
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)
    low, high = (np.log10(power[:, (hertz > start) & (hertz <= stop)].sum(1) + 1e-4) for start, stop in BANDS)
    columns = {
        "mean": mean,
        "std": std,
        "min": x.min(1),
        "max": x.max(1),
        "median": median,
        "iqr": three_quarters - quarter,
        "step": 5.0 * np.abs(np.diff(x, axis=1)).mean(1),
        "skew": (centred**3).mean(1) / std**3,
        "kurtosis": (centred**4).mean(1) / std**4 - 3.0,
        "crossings": (np.diff(np.signbit(centred), axis=1)).sum(1) * RATE / (WINDOW - 1),
        "frequency": hertz[power.argmax(1)],
        "power_low": low,
        "power_high": high,
    }
    return np.stack([columns[name] for name in STATISTICS], axis=2).reshape(len(x), -1)


def download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "-d", str(folder), f"seglearn=={VERSION}"], check=True)
    return next(folder.glob("seglearn-*.whl"))


def build(wheel: Path, out: Path) -> Path:
    content = wheel.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != WHEEL_SHA256:  # the recordings are a pickle: read only the file that was looked at
        raise SystemExit(f"error: {wheel} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        raw = np.load(io.BytesIO(archive.read("seglearn/data/watch_dataset.npy")), allow_pickle=True).item()
        notice = archive.read(f"seglearn-{VERSION}.dist-info/LICENSE")
    cut = [windows(np.asarray(recording, dtype=np.float64)) for recording in raw["X"]]
    repeats = [len(part) for part in cut]
    features = describe(np.concatenate(cut)).astype(np.float16)
    if not np.isfinite(features).all():
        raise SystemExit("error: a statistic does not fit into float16; scale it")
    out.mkdir(parents=True, exist_ok=True)
    target = out / "watch.npz.xz"
    table = io.BytesIO()
    np.savez(
        table,
        features=np.asfortranarray(features),  # the values of a column resemble each other
        labels=np.repeat(raw["y"], repeats).astype(np.uint8),
        side=np.repeat(raw["side"], repeats).astype(np.uint8),
        subject=np.repeat(raw["subject"], repeats).astype(np.uint8),
        class_names=np.array(raw["y_labels"]),
        feature_names=np.array([f"{channel}_{name}" for channel in raw["X_labels"] for name in STATISTICS]),
    )
    target.write_bytes(lzma.compress(table.getvalue(), filters=COMPRESSION))
    (out / "LICENSE.seglearn").write_bytes(notice)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a downloaded wheel; without it pip fetches it")
    default = Path(__file__).parents[1] / "src" / "vardass" / "data" / "watch"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = build(arguments.wheel or download(Path(folder)), arguments.out)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
