"""Your own kernel, for the discrepancy and for the strata.

python examples/own_kernel.py             # in settings: {"kernel": "own_kernel:Cosine"}
"""

from torch.nn.functional import normalize

from vardass.adapt import RunConfig, Trainer, final_report
from vardass.data import load_task, split_task
from vardass.kernels import Kernel


class Cosine(Kernel):
    """(1 + cosine of the angle)²; positive definite, as sums and products of such kernels are."""

    def _matrix(self, x, y):
        x, y = normalize(x), normalize(x if y is None else y)
        return (1 + x @ y.T).square()

    def _diag(self, x):
        return x.new_full((len(x),), 4.0)


if __name__ == "__main__":
    splits = split_task(load_task("watch", "left-A->right-B"), seed=0)
    config = RunConfig(steps=120, batch_size=16, algorithm_options={"kernel": Cosine(), "penalty": 0.3})
    result = Trainer(config, splits).run()
    print(f"target accuracy after {result.step} steps: {final_report(result, splits)['target_accuracy']:.3f}")
