"""Domains, tasks and their splits; loaders of data sets; and a small data set that comes with the package.

Importing it takes torch and numpy; Pillow, kornia, soundfile, pyarrow and scikit-learn are imported when
they are needed.
"""

from vardass.data.audio import AudioDataset, FrontEnd
from vardass.data.domains import Domain, LabelsHidden, Task, TensorInputs, unite
from vardass.data.embedding_tasks import embedding_task
from vardass.data.from_paths import folder_domain, folder_task
from vardass.data.images import ImageDataset, ImagePreprocessing, augment, normalise, random_crops
from vardass.data.registry import DATASETS, DatasetInfo, load_task, task_names
from vardass.data.splits import TaskSplits, named_seed, split_task
from vardass.data.watch import WatchData, load_watch, watch_domains
from vardass.scaling import standardise

__all__ = [
    "DATASETS",
    "AudioDataset",
    "DatasetInfo",
    "Domain",
    "FrontEnd",
    "ImageDataset",
    "ImagePreprocessing",
    "LabelsHidden",
    "Task",
    "TaskSplits",
    "TensorInputs",
    "WatchData",
    "augment",
    "embedding_task",
    "folder_domain",
    "folder_task",
    "load_task",
    "load_watch",
    "named_seed",
    "normalise",
    "random_crops",
    "split_task",
    "standardise",
    "task_names",
    "unite",
    "watch_domains",
]
