"""Your own algorithm: cross-entropy plus the squared distance of the mean features.

python examples/own_algorithm.py          # in settings: algorithm="own_algorithm:MeanMatching"
"""

from vardass.adapt import Algorithm, RunConfig, Trainer, final_report, weighted_mean
from vardass.data import load_task, split_task


class MeanMatching(Algorithm):
    name, uses_target = "mean-matching", True

    def __init__(self, network, num_classes, *, penalty=0.1, **common):
        super().__init__(network, num_classes, **common)
        self.penalty = penalty

    kernel = "linear"  # strata for the quantity that the loss compares

    def losses(self, source, target, step):
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)  # with the weights of the batch
        gap = (weighted_mean(z_s, source.weights) - weighted_mean(z_t, target.weights)).square().sum()
        return {"total": task + self.penalty * gap, "task": task, "gap": gap}


if __name__ == "__main__":
    splits = split_task(load_task("watch", "left-A->right-B"), seed=0)
    result = Trainer(RunConfig(steps=120, batch_size=16), splits, algorithm=MeanMatching).run()
    print(f"target accuracy after {result.step} steps: {final_report(result, splits)['target_accuracy']:.3f}")
