#!/bin/sh
# cuda_skipped.sh - stands for the tests of the CUDA backend where they cannot be built.
. tests/lib.sh
skip "tests/cuda" "no C++ compiler"
closing
