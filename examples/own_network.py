"""Your own network: any module from samples to features. Head, bottleneck and freezing are settings.

python examples/own_network.py            # in settings: network="own_network:Residual"
"""

from torch import nn

from vardass.adapt import RunConfig, Trainer, final_report
from vardass.data import load_task, split_task


class Residual(nn.Module):
    def __init__(self, input_shape, width=64):
        super().__init__()
        self.first = nn.Linear(input_shape[0], width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        z = self.first(x).relu()
        return z + self.second(z).relu()


if __name__ == "__main__":
    splits = split_task(load_task("watch", "left-A->right-B"), seed=0)
    config = RunConfig(steps=120, batch_size=16, network_options={"bottleneck": 32})
    result = Trainer(config, splits, network=Residual((78,))).run()
    print(f"target accuracy after {result.step} steps: {final_report(result, splits)['target_accuracy']:.3f}")
