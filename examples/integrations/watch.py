"""Data of the recipes: smart-watch windows from one wrist of one group; the target is the other wrist of another."""

from vardass.data import standardise, watch_domains

domains = watch_domains()
(x, y), (target, truth) = domains["left-A"], domains["right-B"]
x, target = standardise(x), standardise(target, reference=x)  # (n, 78), (m, 78)
classes = 7


def report(guess, library):
    print(f"target accuracy with {library}: {(guess == truth).double().mean():.3f}")
