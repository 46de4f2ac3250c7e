"""A stream of Parquet files without an index: weights for each batch from running statistics.

pip install 'vardass[cli]'          # pyarrow
"""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from watch import classes, report, target, x, y

from vardass.losses import StreamWeights, mmd2


def write(folder, features, **columns):
    """Eight files, as a pipeline would write them, with rows in random order because there is no index to shuffle."""
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    for i, rows in enumerate(order.tensor_split(8)):
        table = {"z": features[rows].tolist(), **{name: values[rows].tolist() for name, values in columns.items()}}
        pq.write_table(pa.table(table), folder / f"{i}.parquet", row_group_size=64)


class ParquetStream(IterableDataset):
    """Repeats the rows of the files, shuffled in a buffer; each worker reads its own files."""

    def __init__(self, folder, *columns, buffer=512, seed=0):
        self.files, self.columns, self.buffer, self.seed = sorted(folder.glob("*.parquet")), columns, buffer, seed

    def __iter__(self):
        worker = get_worker_info()
        files = self.files[worker.id :: worker.num_workers] if worker else self.files
        generator = torch.Generator().manual_seed(self.seed + (worker.id if worker else 0))
        kept = []
        while True:
            for i in torch.randperm(len(files), generator=generator).tolist():
                for block in pq.ParquetFile(files[i]).iter_batches(64, columns=list(self.columns)):
                    for row in zip(*(torch.tensor(column.to_pylist()) for column in block.columns)):
                        kept.append(row)
                        if len(kept) > self.buffer:
                            place = int(torch.randint(len(kept), (), generator=generator))
                            kept[place], kept[-1] = kept[-1], kept[place]
                            yield kept.pop()


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(78, 64), nn.ReLU(), nn.Linear(64, 32))
    head = nn.Linear(32, classes)
    optimiser = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=3e-3)
    weights_s, weights_t = StreamWeights("mmd"), StreamWeights("mmd")  # one for each domain
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "source"), Path(folder, "target")
        for place in (here, there):
            place.mkdir()
        write(here, x, label=y)
        write(there, target)
        loaders = (
            DataLoader(ParquetStream(here, "z", "label"), batch_size=32),
            DataLoader(ParquetStream(there, "z", seed=1), batch_size=32),
        )
        for step, ((xs, ys), (xt,)) in enumerate(zip(*loaders), 1):
            zs, zt = net(xs), net(xt)
            loss = cross_entropy(head(zs), ys) + mmd2(zs, zt, weights_x=weights_s(zs), weights_y=weights_t(zt))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step == 150:
                break
    with torch.no_grad():
        report(head(net(target)).argmax(1), "a stream of Parquet files")


if __name__ == "__main__":
    main()
