"""Images: decoding, random crops, augmentation, and the preprocessing that a network was trained with."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from conftest import refused
from vardass.data import Domain, ImageDataset, ImagePreprocessing, augment, normalise, random_crops, unite
from vardass.data.images import IMAGENET, crop_box
from vardass.errors import MissingExtraError

PLAIN = ImagePreprocessing(mean=(0.0, 0.0, 0.0), deviation=(1.0, 1.0, 1.0))  # values stay from 0 to 1
SIGNED = ImagePreprocessing(mean=(127 / 255,) * 3, deviation=(128 / 255,) * 3)


def save(path, mode="RGB", size=(8, 6), value=100):
    bands = len(mode) if mode in ("RGB", "RGBA", "LA") else 1
    array = np.full((size[1], size[0], bands), value, np.uint8)
    Image.fromarray(array.squeeze(-1) if bands == 1 else array).save(path)
    return path


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


def test_bad_images(tmp_path):
    (tmp_path / "text.png").write_text("this is text")
    (tmp_path / "empty.jpg").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "ok.png")
    whole = (tmp_path / "ok.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = ImageDataset([tmp_path / name for name in ("text.png", "empty.jpg", "cut.png", "gone.png")], size=4)
    for i, named in enumerate(
        (
            (tmp_path / "text.png", "12 bytes", "not an image"),
            (tmp_path / "empty.jpg", "0 bytes", "not an image"),
            (tmp_path / "cut.png", "truncated"),
            (tmp_path / "gone.png", "no image"),
        )
    ):
        with refused(*named):
            data[i]
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with refused("float.tiff", "F pixels", "8 or 16 bits"):
        ImageDataset([tmp_path / "float.tiff"], size=4)[0]
    with refused("0 image files", "at least one"):
        ImageDataset([])
    with refused("channels", 4, 3, 1):
        ImageDataset([tmp_path / "ok.png"], channels=4)
    for paths in (None, "a.png"):
        with refused("paths", repr(paths), "list"):
            ImageDataset(paths)
    with refused("batch", "list", "tensor"):
        normalise([1])
    with refused("size", 0, 1, field="size"):
        ImageDataset([tmp_path / "ok.png"], size=0)


def test_a_corrupt_image_names_itself_from_a_worker(tmp_path):
    save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"nonsense")
    loader = DataLoader(ImageDataset([tmp_path / "good.png", tmp_path / "broken.png"], size=4), 2, num_workers=1)
    with refused("broken.png", "not an image"):
        list(loader)


def test_cache_is_filled_by_workers_and_survives_the_files(tmp_path):
    files = [save(tmp_path / f"{i}.png", value=10 * i) for i in range(6)]
    plain = ImageDataset(files, size=4)
    data = ImageDataset(files, size=4, cache=True)
    wanted = torch.stack([plain[i] for i in range(6)])
    assert torch.equal(torch.cat(list(DataLoader(data, 3, num_workers=1))), wanted)
    for file in files:
        file.unlink()
    kept = data[-1]
    assert torch.equal(kept, wanted[5])
    kept.zero_()  # a copy
    assert torch.equal(data[5], wanted[5])


def test_cache_that_cannot_fit_is_refused():
    with refused("1 samples", "40000000.00 GB", "cache", "/dev/shm"):
        ImageDataset(["a.png"]).keep((10**8, 10**8), torch.float32)


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
    plain = augment(x, seed=1, preprocessing=PLAIN)
    assert float(plain.min()) >= 0.0
    assert float(plain.max()) <= 1.0
    assert torch.allclose(normalise(plain), first)


def test_each_image_of_a_batch_is_augmented_differently():
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    out = augment(image.expand(8, -1, -1, -1), seed=0, preprocessing=PLAIN)
    assert all(not torch.equal(out[i], out[j]) for i in range(8) for j in range(i))


def test_augmentation_has_domainbeds_rates():
    # red and green stay coloured under crop, mirroring and jitter, so equal channels tell grey
    image = torch.zeros(1, 3, 12, 12)
    image[:, 0, :, :6] = 0.8
    image[:, 1, :, 6:] = 0.8
    out = augment(image.expand(2000, -1, -1, -1), seed=0, preprocessing=PLAIN)
    spread = (out.amax(1) - out.amin(1)).amax((1, 2))
    grey = float((spread < 1e-4).float().mean())
    assert grey == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 2000))
    ramp = torch.linspace(0.2, 0.8, 12).expand(2000, 1, 12, 12)
    mirrored = augment(ramp, seed=0, preprocessing=PLAIN)
    share = float((mirrored[:, 0, 6, 1] > mirrored[:, 0, 6, -2]).float().mean())
    assert share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 2000))
    flat = augment(torch.full((2000, 1, 4, 4), 0.5), seed=0, preprocessing=PLAIN)[:, 0, 0, 0]
    assert float(flat.min()) >= 0.35 - 1e-4  # brightness 0.7 to 1.3; contrast does not change a flat image
    assert float(flat.max()) <= 0.65 + 1e-4
    assert float(flat.std()) == pytest.approx(0.3 / math.sqrt(12), rel=0.1)


def test_normalise_and_bad_batches():
    x = torch.tensor([0.485, 0.456, 0.406])[None, :, None, None].expand(2, 3, 4, 4)
    assert float(normalise(x).abs().max()) < 1e-6
    assert float(normalise(torch.full((1, 1, 2, 2), 0.449)).abs().max()) < 1e-6
    assert normalise(torch.ones(1, 3, 1, 1)).flatten().tolist() == pytest.approx(
        [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    )
    for bad in (torch.zeros(3, 4, 4), torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)):
        with refused("batch", bad.dtype, tuple(bad.shape), "(n, 3 or 1, height, width)"):
            augment(bad, seed=0)


@pytest.mark.parametrize(("module", "extra"), [("PIL", "PIL.*"), ("kornia.augmentation", "kornia.*")])
def test_missing_packages_name_their_extra(monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=extra + r"vardass\[adapt\]"):
        ImageDataset(["a.png"]) if module == "PIL" else augment(torch.zeros(1, 3, 5, 7), seed=0)


# ---- random crops of the full image


def positions(path, width, height):
    """An image whose red and green are the share of the way from left to right and from top to bottom."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.round(255 * (np.arange(width) + 0.5) / width)
    pixels[..., 1] = np.round(255 * (np.arange(height) + 0.5) / height)[:, None]
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("width", "height"), [(400, 300), (240, 320)])
def test_crops_have_domainbeds_area_and_shape_in_the_file_not_in_the_squeezed_image(tmp_path, width, height):
    size = 32
    data = ImageDataset([positions(tmp_path / "a.png", width, height)], size=size)
    areas, ratios = [], []
    for seed in range(60):
        x = data.crop(0, seed)
        assert x.shape == (3, size, size)
        # the outermost pixels are half a pixel from the border of the crop
        across = float(x[0, size // 2, -1] - x[0, size // 2, 0]) * size / (size - 1)
        down = float(x[1, -1, size // 2] - x[1, 0, size // 2]) * size / (size - 1)
        areas.append(across * down)
        ratios.append(across * width / (down * height))
    assert 0.68 < min(areas) < 0.78
    assert 0.9 < max(areas) < 1.02
    assert min(ratios) > 0.72
    assert max(ratios) < 1.36


def test_crops_keep_detail_that_the_squeezed_image_has_lost(tmp_path):
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    data = ImageDataset([tmp_path / "a.png"], size=64, channels=1, interpolation="nearest")
    small = ImageDataset([tmp_path / "a.png"], size=16, channels=1)[0]
    assert float(small.std()) < 0.02  # grey: the stripes are gone
    assert float(data.crop(0, 0).std()) > 0.4


def test_boxes_lie_in_the_image_and_are_as_drawn():
    boxes = [crop_box(90, 120, torch.Generator().manual_seed(seed)) for seed in range(2000)]
    assert boxes[:20] == [crop_box(90, 120, torch.Generator().manual_seed(seed)) for seed in range(20)]
    left, top, right, bottom = torch.tensor(boxes, dtype=torch.float64).T
    assert float(left.min()) >= 0
    assert float(top.min()) >= 0
    assert float(right.max()) <= 120
    assert float(bottom.max()) <= 90
    width, height = right - left, bottom - top
    share, ratio = width * height / (90 * 120), width / height
    assert float(share.min()) > 0.69
    assert float(share.max()) < 1.02  # sides are rounded
    assert float(ratio.min()) > 0.74
    assert float(ratio.max()) < 1.35
    # places are uniform among those that fit: the middle of the crop is on average the middle of the image
    for low, high, side in ((left, right, 120), (top, bottom, 90)):
        offset = (low + high - side) / 2
        assert abs(float(offset.mean())) < 4 * float(offset.std()) / math.sqrt(2000)


def test_an_image_that_no_crop_fits_is_cut_in_the_middle():
    generator = torch.Generator().manual_seed(0)
    assert crop_box(100, 1000, generator) == (433, 0, 566, 100)  # 4/3 as wide as high
    assert crop_box(1000, 90, generator) == (0, 440, 90, 560)  # 3/4
    assert crop_box(1, 1, generator) == (0, 0, 1, 1)


def test_crops_of_cut_and_united_data_sets_reach_their_files(tmp_path):
    files = [save(tmp_path / f"{i}.png", value=10 * i) for i in range(6)]
    domains = [
        Domain(name, ImageDataset(part, size=4, cache=True), None, (), kind="image")
        for name, part in (("a", files[:4]), ("b", files[4:]))
    ]
    united = unite([domains[0].subset(torch.tensor([3, 1])), domains[1]])
    crops = random_crops(united.dataset)
    assert len(crops) == 4
    keys = [[(0, 7), (1, 8)], [(2, 9), (3, 10)]]
    loaded = torch.cat(list(DataLoader(crops, batch_sampler=keys, num_workers=1)))
    assert (255 * loaded[:, 0, 0, 0]).round().tolist() == [30, 10, 40, 50]
    mixed = unite(
        [domains[0], Domain("c", torch.utils.data.TensorDataset(torch.zeros(2, 3, 4, 4)), None, (), kind="image")]
    )
    assert random_crops(mixed.dataset) is None


def test_augmentation_of_crops_cuts_no_more():
    ramp = torch.linspace(0.3, 0.5, 12).expand(64, 1, 12, 12)
    out = augment(ramp, seed=0, crop=False, preprocessing=PLAIN)
    level = out[:, 0] - out[:, 0].mean((1, 2), keepdim=True)
    slope = level[:, 0] / level[:, 0, -1:]  # brightness and contrast stretch the ramp; a crop would shift it
    assert torch.allclose(slope, torch.linspace(-1, 1, 12).expand(64, 12), atol=1e-3)


# ---- preprocessing


def test_preprocessing_is_plain_values_and_back():
    given = ImagePreprocessing(size=96, interpolation="bicubic", mean=[0.1, 0.2, 0.3])
    assert given.size == (96, 96)
    assert ImagePreprocessing.from_dict(json.loads(json.dumps(dataclasses.asdict(given)))) == given
    assert ImagePreprocessing.from_dict({}) == IMAGENET == ImagePreprocessing()


def test_normalisation_follows_the_preprocessing():
    x = torch.arange(256.0).expand(1, 3, 1, 256)
    assert torch.allclose(normalise(x / 255, SIGNED), (x - 127) / 128, atol=1e-6)
    grey = normalise(x[:, :1] / 255, ImagePreprocessing(mean=(0.2, 0.3, 0.4), deviation=(1.0, 2.0, 3.0)))
    assert torch.allclose(grey, (x[:, :1] / 255 - 0.3) / 2)
    batch = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = augment(batch, seed=3, preprocessing=PLAIN)
    assert torch.allclose(augment(batch, seed=3, preprocessing=SIGNED), normalise(plain, SIGNED))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_interpolation_is_that_of_pillow(tmp_path, interpolation):
    pixels = np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    x = ImageDataset([tmp_path / "a.png"], size=5, interpolation=interpolation)[0]
    wanted = Image.fromarray(pixels).resize((5, 5), Image.Resampling[interpolation.upper()])
    assert torch.equal((255 * x).round().byte(), torch.from_numpy(np.array(wanted)).permute(2, 0, 1))


HUB = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.5], "size": 224, "resample": 3}


@pytest.mark.parametrize(
    ("changes", "size", "mean", "interpolation"),
    [
        ({}, (224, 224), 0.5, "bicubic"),
        ({"size": {"shortest_edge": 384}, "resample": 2}, (384, 384), 0.5, "bilinear"),
        ({"size": {"height": 256, "width": 128}}, (256, 128), 0.5, "bicubic"),
        ({"size": 256, "do_center_crop": True, "crop_size": {"height": 240, "width": 240}}, (240, 240), 0.5, "bicubic"),
        ({"do_center_crop": False, "crop_size": 100}, (224, 224), 0.5, "bicubic"),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [64.0] * 3}, (224, 224), 0.5, "bicubic"),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3}, (224, 224), 0.5, "bicubic"),
        ({"do_normalize": False}, (224, 224), 0.0, "bicubic"),
    ],
)
def test_preprocessing_of_a_hub_model(tmp_path, changes, size, mean, interpolation):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**HUB, **changes}))
    found = ImagePreprocessing.from_hub(tmp_path)
    assert found == ImagePreprocessing.from_hub(tmp_path / "preprocessor_config.json")
    assert (found.size, found.interpolation) == (size, interpolation)
    assert found.mean[0] == pytest.approx(mean)


def test_preprocessing_is_that_of_the_hubs_own_code(tmp_path):
    transformers = pytest.importorskip("transformers")
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.5], resample=2
    )
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    preprocessing = ImagePreprocessing.from_hub(tmp_path)
    data = ImageDataset([tmp_path / "a.png"], size=preprocessing.size, interpolation=preprocessing.interpolation)
    wanted = torch.as_tensor(np.asarray(processor(Image.fromarray(pixels))["pixel_values"][0]))
    assert torch.allclose(normalise(data[0][None], preprocessing)[0], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "field", "named"),
    [
        (lambda: ImagePreprocessing(mean=(0.5, 0.5)), None, ("mean", 3, (0.5, 0.5))),
        (lambda: ImagePreprocessing(deviation=(0.5, 0.0, 0.5)), None, ("deviation", "above 0", (0.5, 0.0, 0.5))),
        (lambda: ImagePreprocessing(size=(8, 8, 8)), None, ("size", (8, 8, 8), "height", "width")),
        (lambda: ImagePreprocessing(interpolation="bilinaer"), "interpolation", ("'bilinaer'", "'bilinear'")),
        (lambda: ImagePreprocessing.from_dict({"std": 1}), None, ("'std'", "deviation")),
        (lambda: ImageDataset(["a.png"], interpolation="cubic"), "interpolation", ("'cubic'", "'bicubic'")),
    ],
)
def test_bad_preprocessing(make, field, named):
    with refused(*named, field=field):
        make()


def test_bad_hub_files(tmp_path):
    with refused(tmp_path / "preprocessor_config.json", "No such file"):
        ImagePreprocessing.from_hub(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for text, said in (
        ("{", "JSONDecodeError"),
        ("[]", "list"),
        (json.dumps({"size": 224}), "image_mean"),
        (json.dumps({**HUB, "resample": 9}), "IndexError"),
        (json.dumps({**HUB, "size": {}}), "height"),
    ):
        file.write_text(text)
        with refused(file, said, "save_pretrained"):
            ImagePreprocessing.from_hub(file)
