"""Tests of Ctrl-C need it to work: a job that was started in the background ignores it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
