#!/bin/sh
# Install Debian's chromium, for the tests of the report's page, where that is possible without asking anybody.
set -u
if command -v chromium >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "chromium is not installed: the browser tests will be skipped" >&2
