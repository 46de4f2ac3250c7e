"""Data sets that come with the package."""

from vardass.data.watch import WatchData, load_watch, standardise, watch_domains

__all__ = ["WatchData", "load_watch", "standardise", "watch_domains"]
