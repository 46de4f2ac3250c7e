"""Bring data that no setting was chosen on into the layouts that ``vardass`` reads.

    pip download --no-deps --only-binary :all: --python-version 36 --platform manylinux1_x86_64 --abi cp36m \\
        scikit-multiflow==0.3.0
    unzip -d multiflow scikit_multiflow*.whl
    apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist*.deb fashion
    python results/make_other_data.py multiflow/skmultiflow/data/datasets \\
        fashion/usr/share/datasets/fashion-mnist ../evidence

OUT/covtype/<area>.npz      forest cover by wilderness area: 10 measurements, 40 soil types; classes of all areas
OUT/elec/<quarter>.npz      electricity prices up or down, by quarter of the time
OUT/weather/<season>.npz    rain or none, by season of the year
OUT/fashion/<change>.npz    Fashion-MNIST, 14 x 14: plain, turned by 30 to 60 degrees, noisy, blurred; no picture twice

At most 3,000 samples in each domain.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

_MOST = 3000


def _save(folder: Path, name: str, x: np.ndarray, labels: np.ndarray, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keep = np.random.default_rng(seed).permutation(len(x))[:_MOST]
    np.savez_compressed(folder / f"{name}.npz", x=x[keep].astype("f4"), labels=labels[keep].astype("i8"))


def covtype(source: Path, out: Path) -> None:
    table = np.loadtxt(source / "covtype.csv", delimiter=",", skiprows=1, dtype="f4")
    area = table[:, 10:14].argmax(1)
    features = np.delete(table, [10, 11, 12, 13, 54], axis=1)
    labels = table[:, 54] - 1
    shared = np.isin(labels, (0, 1, 6))  # spruce, lodgepole pine, krummholz: neota has no others
    for number, name in enumerate(("rawah", "neota", "comanche")):
        keep = (area == number) & shared
        _save(out / "covtype", name, features[keep], labels[keep])


def elec(source: Path, out: Path) -> None:
    table = np.loadtxt(source / "elec.csv", delimiter=",", skiprows=1)
    for number, quarter in enumerate(np.array_split(table, 4), 1):
        _save(out / "elec", f"q{number}", quarter[:, :-1], quarter[:, -1])


def weather(source: Path, out: Path) -> None:
    table = np.loadtxt(source / "weather.csv", delimiter=",", skiprows=1)
    season = (np.arange(len(table)) % 365.25 / 365.25 * 4).astype(int)
    for number, name in enumerate(("winter", "spring", "summer", "autumn")):
        _save(out / "weather", name, table[season == number, :-1], table[season == number, -1])


def fashion(source: Path, out: Path) -> None:
    files = (("images-idx3", 16), ("labels-idx1", 8))
    images, labels = (
        np.frombuffer(gzip.decompress((source / f"train-{kind}-ubyte.gz").read_bytes()), "u1", offset=offset)
        for kind, offset in files
    )
    pixels = images.reshape(-1, 28, 28)
    rng = np.random.default_rng(0)
    changes = {
        "plain": lambda image: image,
        "turned": lambda image: image.rotate(float(rng.uniform(30, 60)), Image.Resampling.BILINEAR),
        "noisy": lambda image: Image.fromarray(
            np.clip(np.asarray(image) + rng.normal(0, 60, (28, 28)), 0, 255).astype("u1")
        ),
        "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    }
    for number, (name, change) in enumerate(changes.items()):
        part = slice(number * _MOST, (number + 1) * _MOST)
        changed = (change(Image.fromarray(image)) for image in pixels[part])
        small = [np.asarray(image.resize((14, 14), Image.Resampling.BOX)) for image in changed]
        _save(out / "fashion", name, np.stack(small).reshape(_MOST, -1) / 255, labels[part])


if __name__ == "__main__":
    tables, pictures, target = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    for make, source in ((covtype, tables), (elec, tables), (weather, tables), (fashion, pictures)):
        make(source, target)
        print(f"made {target / make.__name__}")
