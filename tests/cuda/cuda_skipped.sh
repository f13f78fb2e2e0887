#!/bin/sh
# cuda_skipped.sh - reports the tests of the CUDA backend as skipped where they cannot be built.
. tests/lib.sh
skip "tests/cuda" "no C++ compiler"
closing
