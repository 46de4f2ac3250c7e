"""Bring development data into the layouts that ``vardass`` reads: ``python results/make_data.py SHARED_DATA OUT``.

OUT/digits16/<set>.npz   five digit sets as 16 x 16 grey pixels (28 x 28 ones cropped to 20 x 20), at most 3,000 each
OUT/digits_pictures/<set>/<digit>/*.png   the same as pictures, for networks with convolutions
OUT/reviews/<kind>.npz   Amazon reviews: log(1 + counts) on the first 256 singular directions of all four kinds together
OUT/fsdd/<speaker>.npz   spoken digits: 40 x 32 log-mel values of each clip
OUT/pacs32/<style>/<class>/*.png   thumbnails of 32 x 32 pixels
OUT/office64/<domain>/<class>/*.jpg   Office-Home at 64 x 64 pixels, in the layout of the original
The features of PACS and Office-Home are read where they are: one .npz file with feat_<domain> and y_<domain>.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.sparse import csr_matrix, vstack
from sklearn.decomposition import TruncatedSVD

_MOST = 3000


def digits(source: Path, out: Path) -> None:
    found = np.load(source / "digits" / "digits.npz")
    for name in ("mnist", "usps", "mnistm", "semeion", "optdigits"):
        prefix = f"{name}_train" if f"{name}_train_x" in found else name
        x, y = found[f"{prefix}_x"], found[f"{prefix}_y"]
        keep = np.random.default_rng(0).permutation(len(x))[:_MOST]
        pixels = np.stack([_grey16(image) for image in x[keep]]).reshape(len(keep), -1)
        np.savez_compressed(out / f"{name}.npz", x=pixels.astype("f4") / 255, labels=y[keep])


def _grey16(image: np.ndarray) -> np.ndarray:
    grey = image.mean(2) if image.ndim == 3 else image.astype("f4")
    if grey.shape[0] == 28:
        grey = grey[4:24, 4:24]
    return np.asarray(Image.fromarray(grey.astype("f4"), mode="F").resize((16, 16), Image.Resampling.BOX))


def digit_pictures(source: Path, out: Path) -> None:
    for file in sorted((out.parent / "digits16").glob("*.npz")):
        found = np.load(file)
        pictures = np.rint(255 * found["x"].reshape(-1, 16, 16)).astype("u1")
        for number, (image, label) in enumerate(zip(pictures, found["labels"], strict=True)):
            folder = out / file.stem / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05}.png")


def reviews(source: Path, out: Path) -> None:
    found = np.load(source / "amazon_reviews" / "amazon_reviews.npz")
    kinds = ("books", "dvd", "electronics", "kitchen")
    counts, labels = {}, {}
    for kind in kinds:
        parts, marks = [], []
        for split, most in (("train", None), ("test", 2000)):
            data, indices, indptr, y = (found[f"{kind}_{split}_{part}"] for part in ("data", "indices", "indptr", "y"))
            matrix = csr_matrix((data.astype("f4"), indices.astype("i4"), indptr), shape=(len(y), 5000))
            keep = np.random.default_rng(0).permutation(len(y))[:most]
            parts.append(matrix[keep].log1p())
            marks.append(y[keep])
        counts[kind], labels[kind] = vstack(parts), np.concatenate(marks)
    directions = TruncatedSVD(256, random_state=0).fit(vstack(list(counts.values())))
    for kind in kinds:
        np.savez_compressed(out / f"{kind}.npz", x=directions.transform(counts[kind]).astype("f4"), labels=labels[kind])


def speakers(source: Path, out: Path) -> None:
    found = np.load(source / "fsdd_speakers" / "fsdd_logmel.npz")
    for number, speaker in enumerate(found["domains"]):
        mine = found["domain"] == number
        np.savez_compressed(
            out / f"{speaker}.npz", x=found["logmel"][mine].reshape(mine.sum(), -1), labels=found["y"][mine]
        )


def thumbnails(source: Path, out: Path) -> None:
    images = np.load(source / "pacs" / "pacs_img32.npz")
    features = np.load(source / "pacs" / "pacs_effnetlite0.npz")
    classes = [str(name) for name in features["classes"]]
    for style in (str(name) for name in features["domains"]):
        for number, (image, label) in enumerate(zip(images[f"img_{style}"], features[f"y_{style}"], strict=True)):
            folder = out / style / classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:05}.png")


def small_pictures(source: Path, out: Path) -> None:
    pictures = np.load(source / "office_home" / "office_home_jpeg64.npz")
    features = np.load(source / "office_home" / "office_home_resnet18.npz")
    classes = [str(name) for name in features["classes"]]
    for domain in (str(name) for name in features["domains"]):
        content, ends = pictures[f"jpeg_{domain}"], pictures[f"offsets_{domain}"]
        for number, label in enumerate(features[f"y_{domain}"]):
            folder = out / domain / classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:05}.jpg").write_bytes(content[ends[number] : ends[number + 1]].tobytes())


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python results/make_data.py SHARED_DATA OUT")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    layouts = {
        "digits16": digits,
        "digits_pictures": digit_pictures,
        "reviews": reviews,
        "fsdd": speakers,
        "pacs32": thumbnails,
        "office64": small_pictures,
    }
    for name, make in layouts.items():
        folder = out / name
        if folder.exists():
            print(f"{folder} is there already")
            continue
        folder.mkdir(parents=True)
        make(source, folder)
        print(f"made {folder}")


if __name__ == "__main__":
    main()
