"""The four data sets of the paper: readers of their published layouts."""

from vardass.data.registry import DatasetInfo
from vardass.paper.datasets import camelyon17, humpbacks, office_home, spawrious

__all__ = ["CAMELYON17", "HUMPBACKS", "OFFICE_HOME", "SPAWRIOUS"]

_PAPER_IMAGES = {"network": "resnet18", "augment": "source"}
CAMELYON17 = DatasetInfo(
    "camelyon17",
    "tumours in tissue, 5 hospitals",
    camelyon17.LAYOUT,
    camelyon17.ORIGIN,
    camelyon17.load_camelyon17,
    camelyon17.camelyon17_names,
    _PAPER_IMAGES,
)
HUMPBACKS = DatasetInfo(
    "humpbacks",
    "whale calls, 4 monitoring programs",
    humpbacks.LAYOUT,
    humpbacks.ORIGIN,
    humpbacks.load_humpbacks,
    humpbacks.humpback_names,
    {"network": "audio"},
)
SPAWRIOUS = DatasetInfo(
    "spawrious",
    "dogs on misleading backgrounds, 6 tasks",
    spawrious.LAYOUT,
    spawrious.ORIGIN,
    spawrious.load_spawrious,
    spawrious.spawrious_names,
    _PAPER_IMAGES,
)
OFFICE_HOME = DatasetInfo(
    "office-home",
    "65 everyday things in 4 styles, 12 pairs",
    office_home.LAYOUT,
    office_home.ORIGIN,
    office_home.load_office_home,
    office_home.office_home_names,
    _PAPER_IMAGES,
)
