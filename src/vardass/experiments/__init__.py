"""Sweeps of many runs, the tables and figures made from them, and a report to look at."""
